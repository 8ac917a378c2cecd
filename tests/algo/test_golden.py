"""Every golden loss case through the path of a command line: a row and its overrides, as words and numbers.

The cases hold log-probs under the new, old, reference and sampling policies, advantages and a mask, two episodes, and
the loss and its gradient in float64, computed elsewhere (the numbers were checked against a dozen code bases). Each is
named here by what a user would write: loss_fn=<row> loss_fn_config.<key>=<value>.
"""

import contextlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algo.aggregate import token_weights
from jaxrl.algo.algorithm import Algorithm, resolve
from jaxrl.algo.correction import CORRECTIONS
from jaxrl.algo.kl import KL_LOSSES
from jaxrl.algo.loss import LOSSES
from jaxrl.algo.tokens import TokenInputs
from jaxrl.algo.variants import VARIANTS, variant
from jaxrl.train import parse
from jaxrl.types import Datum

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "loss_golden.json").read_text())
CASES = {case["name"]: case for case in GOLDEN["cases"]}
INF = float("inf")


@dataclass(frozen=True)
class Written:
    """loss_fn and loss_fn_config; which columns play the sampler's and the old policy's part; who is in one group."""

    row: str
    config: dict[str, Any] = field(default_factory=dict)
    sampler: str = "old"
    groups: tuple[int, int] = (0, 1)


def old(row: str, **config: Any) -> Written:
    """Anchored to the old policy, with the sampler's log-probs beside it."""
    return Written(row, {"anchor": "old", **config}, sampler="rollout")


PPO = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
SUM, MEAN, ROWS = ({"aggregation": name} for name in ("token_sum", "token_mean", "seq_mean_token_mean"))
WIDE = PPO | {"clip_low_threshold": 0.95, "clip_high_threshold": 1.05}

WRITTEN: dict[str, Written] = {
    "cross_entropy/token_sum": Written("reinforce", {"loss": "cross_entropy", **SUM}),
    "cross_entropy/token_mean": Written("reinforce", {"loss": "cross_entropy"}),
    "reinforce/token_sum": Written("reinforce", SUM),
    "reinforce/token_mean(=gpg policy loss)": Written("reinforce"),
    "reinforce/seq_mean_token_sum": Written("rloo"),
    "importance_sampling/token_sum": Written("importance_sampling"),
    "ppo_clip/token_sum": Written("ppo", PPO),
    "ppo_clip/token_mean": Written("ppo", MEAN),
    "grpo(beta=0)/seq_mean_token_mean": Written("grpo"),
    "dr_grpo/constant": Written("dr_grpo", {"aggregation_constant": 8}),
    # micro-batches of one row: there a mean over a micro-batch is GRPO's. One that depends on the split is not ours
    "bnpo(TRL)/microbatch_size_1": Written("grpo"),
    "dapo/token_mean": Written("dapo"),
    "dual_clip/token_mean": Written("dual_clip"),
    "two_sided_delta/token_mean": Written("dual_clip", {"dual_clip_ratio": 4.0}),
    "ppo_clip_bypass/token_mean": Written("dapo", sampler="rollout"),
    "grpo(beta=0.04,k3)/seq_mean_token_mean": Written("grpo_kl"),
    "gspo/paper_eps": Written("gspo"),
    "gspo/wide_eps": Written("gspo", PPO),
    "gspo_token/uniform_adv": Written("gspo_token", PPO),
    "gspo_token/token_adv": Written("gspo_token", WIDE),
    "luspo": Written("luspo"),
    "cispo/tinker": Written("cispo", {"ratio_max": 4.0, **SUM}),
    "cispo/scalerl_max5": Written("cispo"),
    "cispo/verl_default": Written("cispo", {"ratio_min": 0.8, "ratio_max": 1.2}),
    "cispo/trl_default": Written("cispo", {"ratio_max": 0.2}),
    "rollout_is_masked(SkyRL)/token_mean": Written("rollout_is", {"ratio_max": 1.4}, sampler="rollout"),
    "dro/beta=0.05/token_sum": Written("dro"),
    "dro/beta=1.0/token_sum": Written("dro", {"dro_beta": 1.0}),
    "kimi_k1.5/sequence_level": Written("kimi"),
    "gmpo/eps0.3": Written("gmpo", {"clip_log_low": 0.3, "clip_log_high": 0.3}),
    "sapo/seq_mean_token_mean": Written("sapo"),
    "vespo/token_mean": Written("vespo"),
    "topr/token": Written("topr_token"),
    "topr/seq_product": Written("topr"),
    "topr/seq_geomean": Written("topr", {"episode_ratio": "geometric"}),
    "rloo(TRL)/sequence_product_ratio": Written("rloo_clip", {"clip_high_threshold": 1.4, "kl": "none"}),
    "tis_token/cap2*ppo_clip/token_mean": old("tis"),
    "tis_token/band[0.5,2]_clamp*ppo_clip/token_mean": old("tis", weight_min=0.5),
    "mis_token/band[0.5,2]*ppo_clip/token_mean": old("icepop", weight_max=2.0),
    "icepop/[0.5,5]*ppo_clip/token_mean": old("icepop"),
    "tis_sequence/cap2*ppo_clip/token_mean": old("tis", correction="sequence_truncate"),
    "mis_sequence/max3*ppo_clip/token_mean": old("tis", correction="sequence_mask"),
    "geo_mask[0.9,1.1]/denominator_all*ppo_clip/token_mean": old(
        "geometric_mask", geometric_min=0.9, geometric_max=1.1
    ),
    "geo_mask[0.9,1.1]*token_tis_cap2/denominator_all*ppo_clip/token_mean": old(
        "tis", correction="geometric_mask+token_truncate", geometric_min=0.9, geometric_max=1.1
    ),
    "seq_mask_tis[0.9,1.1]/uncapped_token_weight*ppo_clip/token_mean": old(
        "tis", correction="geometric_mask+token_truncate", geometric_min=0.9, geometric_max=1.1, weight_max=INF
    ),
    "geo_mask[0.9,1.1]*ppo_clip/denominator_kept": old(
        "geometric_mask", geometric_min=0.9, geometric_max=1.1, denominator="kept"
    ),
    "reinforce_token_is_bypass/cap2/token_mean": Written("cispo", {"ratio_max": 2.0}, sampler="rollout"),
    "masked_pg/grpo_rollout_anchor/token_mean": Written(
        "minirl", {"anchor": "sampler", "ratio_max": 10.0}, sampler="rollout"
    ),
    "masked_pg/minirl_recompute_anchor/token_mean": Written("minirl", {"ratio_max": 10.0}, sampler="rollout"),
    "masked_pg/no_mask_cap10/token_mean": Written("cispo", {"ratio_max": 10.0}, sampler="rollout"),
    "decoupled_ppo/uncapped*ppo_clip/token_mean": old("decoupled_ppo"),
    "gspo/areal_token_mean_aggregation": Written("gspo", {**PPO, **MEAN}),
    "gspo/token_adv_averaged": Written("gspo", {**WIDE, "clip_high_threshold": 1.1, **MEAN}),
    "opsm/delta=0.5*ppo_clip/token_mean": Written("opsm", {"opsm_delta": 0.5}),
    "opsm/delta=0.1*ppo_clip/token_mean": Written("opsm"),
    "prime_rl_default/token_mean": Written("prime_rl"),
    "prime_rl_ipo/token_mean": Written("ipo"),
    "drpo/eps=12.5/token_mean": Written("drpo"),
    "drpo/eps=0.15/token_mean": Written("drpo", {"drpo_epsilon": 0.15}),
    "m2po_mask/tau=0.04/denominator_all": Written("m2po"),
    "clip_cov/lb=0.4/token_mean": Written("clip_cov", {"covariance_low": 0.4}),
    "kl_cov/frac=0.2/coef=1/token_mean": Written("kl_cov", {"covariance_share": 0.2}),
    "opd/tinker_importance_sampling/token_sum": Written("distillation", sampler="rollout"),
    "opd/prime_rl_ref_kl/token_mean": Written("reverse_kl", sampler="rollout"),
    "dpo/beta=0.1": Written("reinforce", {"loss": "dpo", "aggregation": "prompt_mean_token_sum"}, groups=(0, 0)),
}
for _delta, _name, _divergence in ((0.15, "tv", "tv"), (0.2, "tv", "tv"), (0.05, "kl", "kl")):
    _knobs = {"divergence": _divergence, "divergence_low": _delta, "divergence_high": _delta, **MEAN}
    for _form, _loss in (("ratio_form", "dppo"), ("logp_form", "dppo_capped")):
        _cap = {"ratio_max": INF} if _form == "logp_form" else {}
        WRITTEN[f"dppo_{_name}/delta={_delta:g}/{_form}/token_mean"] = Written(
            "dppo", {"loss": _loss, **_knobs, **_cap}
        )
for _written, _kl in (
    ("k1", "k1"),
    ("k2", "k2"),
    ("k3", "k3"),
    ("k3+", "k3_plus"),
    ("ratio*k3", "ratio_k3"),
    ("exp(x-sg x)*k3", "k3_plus"),  # another way to write the same value and gradient
    ("sg(ratio)*k2", "ratio_k2"),
):
    WRITTEN[f"kl/{_written}/token_mean"] = Written("ppo", {"kl": _kl, "kl_coef": 1.0, **MEAN})


def test_every_case_is_written() -> None:
    assert set(WRITTEN) == set(CASES)


def test_every_registered_name_has_golden_numbers() -> None:
    """A form, a KL or a correction that no case goes through would be a name without evidence."""
    configs = [
        {"loss": VARIANTS[w.row].loss, "correction": VARIANTS[w.row].correction, **w.config} for w in WRITTEN.values()
    ]
    assert {c["loss"] for c in configs} == set(LOSSES)
    assert {c["kl"] for c in configs if "kl" in c} - {"none"} == set(KL_LOSSES)
    parts = {part for c in configs if c["correction"] for part in c["correction"].split("+")}
    assert parts == set(CORRECTIONS)


OTHERS = {
    "kl_in_advantage/tinker_centred": "algo/test_kl.py",
    "kl_in_reward/token_level_k1": "algo/test_kl.py",
    "kl_in_reward/sequence_level_k1(TRL RLOO)": "algo/test_kl.py",
    "entropy_bonus/token_mean": "algo/test_logprob.py",
    "temperature_and_top_p": "algo/test_logprob.py",
    "dapo_soft_overlong": "algo/test_shaping.py",
    "dynamic_sampling/keep_mask": "algo/test_data.py",
    "episode_split/weights": "algo/test_aggregate.py",
    "prompt_mean/weights": "algo/test_aggregate.py",
}


def test_the_other_cases_are_tested_where_they_belong() -> None:
    """All but a note without numbers: that the log-prob of a sample is no entropy bonus."""
    assert set(OTHERS) == {case["name"] for case in GOLDEN["other_cases"]} - {"entropy_sample_estimator_warning"}
    for name, file in OTHERS.items():
        assert f'"{name}"' in (Path(__file__).parent.parent / file).read_text(), name


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_golden(name: str, dtype: str) -> None:
    case, written = CASES[name], WRITTEN[name]
    wide = jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()
    with wide:
        value, grad = value_and_grad(case, written, dtype)
    assert str(grad.dtype) == dtype
    tolerance = 1e-6 if dtype == "float64" else 1e-5
    np.testing.assert_allclose(value, case["expected_loss"], atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(grad, case["expected_grad"], atol=tolerance, rtol=tolerance)
    assert (grad[np.array(case["mask"]) == 0] == 0).all()


def value_and_grad(case: dict[str, Any], written: Written, dtype: str) -> tuple[Any, Any]:
    algorithm = as_typed(written)
    data_D = datums(case, written)
    objective = algorithm.objective
    if objective.correct is not None:
        data_D = objective.correct(data_D)
    advantages = np.array(case["advantages"])
    if algorithm.penalize is not None:
        data_D = algorithm.penalize([replace(d, advantages=0 * d.advantages) for d in data_D])
        advantages = rows(data_D, "advantages")
    if case["name"].startswith("kl/"):  # the case is the term alone
        advantages = 0 * advantages
    weight = np.stack(token_weights(data_D, objective.aggregation, constant=objective.aggregation_constant))[:, 1:]
    inputs = dense(case, written, data_D, advantages, dtype)

    def total(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.asarray(weight, dtype) * objective.loss(inputs._replace(logp_new=x)).loss)

    value, grad = jax.jit(jax.value_and_grad(total))(inputs.logp_new)
    return np.asarray(value), np.asarray(grad)


def as_typed(written: Written) -> Algorithm:
    """What a recipe makes of the words on its command line."""
    words = [f"loss_fn={written.row}", *(f"loss_fn_config.{key}={value}" for key, value in written.config.items())]
    config = parse(words, model_name="tiny", log_path="run", max_tokens=1)
    assert config.loss_fn_config == written.config
    return resolve(variant(config.loss_fn), config.loss_fn_config)


def datums(case: dict[str, Any], written: Written) -> list[Datum]:
    """The rows of the case as episodes of one datum each, with a first token in front that nothing predicts."""
    lead = lambda row: np.concatenate([[0], row])  # noqa: E731
    mask = [lead(row).astype(bool) for row in case["mask"]]
    pick = lambda name, i: lead(case[name][i]).astype(np.float32)  # noqa: E731
    n = len(case["mask"][0]) + 1
    return [
        Datum(
            tokens=np.zeros(n, np.int32),
            mask=mask[i],
            logprobs=np.where(mask[i], pick(f"logprobs_{written.sampler}", i), 0),
            advantages=np.where(mask[i], pick("advantages", i), 0),
            versions=np.zeros(n, np.int32),
            group=written.groups[i],
            episode=i,
            logprobs_old=pick("logprobs_old", i),
            logprobs_ref=None if case["logprobs_ref"] is None else pick("logprobs_ref", i),
        )
        for i in range(len(mask))
    ]


def rows(data_D: list[Datum], column: str) -> np.ndarray:
    return np.stack([getattr(d, column) for d in data_D])[:, 1:]


def dense(case: dict[str, Any], written: Written, data_D: list[Datum], advantages: Any, dtype: str) -> TokenInputs:
    """The case with its own numbers at full width, poison at masked tokens included."""
    array = lambda values: None if values is None else jnp.asarray(np.array(values), dtype)  # noqa: E731
    ids = lambda values: jnp.asarray(np.repeat(np.array(values)[:, None], len(case["mask"][0]), 1), jnp.int32)  # noqa: E731
    return TokenInputs(
        logp_new=jnp.asarray(np.array(case["logprobs_new"]), dtype),
        logp_sampler=jnp.asarray(np.array(case[f"logprobs_{written.sampler}"]), dtype),
        advantage=jnp.asarray(advantages, dtype),
        mask=jnp.asarray(rows(data_D, "mask")),
        logp_old=array(case["logprobs_old"]),
        logp_ref=array(case["logprobs_ref"]),
        correction=None if data_D[0].correction is None else array(rows(data_D, "correction")),
        position=jnp.arange(len(case["mask"][0]), dtype=jnp.int32) * jnp.ones_like(ids([0] * len(data_D))),
        episode=ids([d.episode for d in data_D]),
        group=ids([d.group for d in data_D]),
    )


def test_the_row_is_what_the_case_says() -> None:
    """One that a typing error in the table above would fail: the thresholds the case used are those of the row."""
    algorithm: Algorithm = resolve(variant("dapo"))
    assert algorithm.objective.loss.knobs["clip_high_threshold"] == 1 + CASES["dapo/token_mean"]["params"]["eps_high"]
