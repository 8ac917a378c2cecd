"""Rows and overrides: every row works, every part can be named, and what has no effect is refused."""

import itertools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from algo_cases import constant_of, ragged

from jaxrl.algo.advantage import ADVANTAGES
from jaxrl.algo.aggregate import AGGREGATIONS
from jaxrl.algo.algorithm import explain, resolve
from jaxrl.algo.correction import CORRECTIONS
from jaxrl.algo.entropy import ENTROPY_BONUSES
from jaxrl.algo.forms import FormResult
from jaxrl.algo.kl import KL_LOSSES, KL_PENALTIES
from jaxrl.algo.knobs import knobs_of
from jaxrl.algo.loss import LOSSES, LossRow
from jaxrl.algo.tokens import TokenInputs
from jaxrl.algo.variants import VARIANTS, Variant, own_variant, variant

REWARDS = {"gdpo": {"rewards": "correct:1"}}  # which metrics are rewards has no default


def constant(aggregation: str) -> dict[str, float]:
    value = constant_of(aggregation)
    return {} if value is None else {"aggregation_constant": value}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_row_resolves_to_what_it_says(name: str) -> None:
    row = VARIANTS[name]
    algorithm = resolve(row, constant(row.aggregation))
    assert algorithm.advantage == row.advantage
    assert algorithm.objective.aggregation == row.aggregation
    assert algorithm.objective.loss.row is LOSSES[row.loss]
    for knob, value in row.loss_fn_config.items():
        bound = {**algorithm.advantage_knobs, **algorithm.objective.loss.knobs}
        places = [bound.get(knob), *(getattr(part, "keywords", {}).get(knob) for part in _partials(algorithm))]
        assert value in places, knob


def _partials(algorithm) -> list:
    correct = algorithm.objective.correct
    return [algorithm.objective.loss.kl, algorithm.penalize, algorithm.penalties, *(correct.args[0] if correct else ())]


PARTS = {
    "advantage": [*ADVANTAGES],
    "loss": [*LOSSES],
    "aggregation": [*AGGREGATIONS],
    "kl": [*KL_LOSSES, *KL_PENALTIES, "reward", "none"],
    "correction": [*CORRECTIONS, "geometric_mask+token_truncate", "none"],
    "entropy": [*ENTROPY_BONUSES, "none"],
    "anchor": ["sampler", "old"],
}


@pytest.mark.parametrize(("part", "name"), [(p, n) for p, names in PARTS.items() for n in names])
def test_every_part_can_be_named_on_some_row(part: str, name: str) -> None:
    """A part that no row could take would be a name that is accepted nowhere."""
    taken = []
    for row in ("ppo", "reinforce", "distillation"):
        try:
            taken.append(resolve(VARIANTS[row], {part: name, **constant(name), **REWARDS.get(name, {})}))
        except ValueError:
            continue
    assert taken


def test_two_parts_that_are_used_together_share_no_knob() -> None:
    """Else a value would silently go to both. Factors are parts of one correction, and may."""
    kinds = {
        "advantage": [row.function for row in ADVANTAGES.values()],
        "loss": [f for row in LOSSES.values() for f in row.functions],
        "kl": [resolve(VARIANTS["ppo"], {"kl": kl}).objective.loss.kl.func for kl in KL_LOSSES],
        "entropy": [*ENTROPY_BONUSES.values()],
        "correction": [*CORRECTIONS.values()],
    }
    names = {kind: {knob for function in functions for knob in knobs_of(function)} for kind, functions in kinds.items()}
    for a, b in itertools.combinations(names, 2):
        assert not names[a] & names[b], (a, b)


@pytest.mark.parametrize(
    ("row", "config", "message"),
    [
        ("ppo", {"clip_lo": 0.8}, "loss_fn_config.clip_lo does not exist; the nearest names are clip_low_threshold"),
        (
            "reinforce",
            {"clip_low_threshold": 0.8},
            "none of advantage 'mean', loss 'reinforce' reads it; it belongs to",
        ),
        ("ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2}, "write 0.8 and 1.2 for what other code bases"),
        (
            "ppo",
            {"clip_low_threshold": "low"},
            "clip_low_threshold='low': expected a number of at least 0",
        ),
        (
            "ppo",
            {"clip_high_threshold": float("nan")},
            "clip_high_threshold=nan: expected a number of at least 1",
        ),
        (
            "dppo",
            {"divergence": "js", "aggregation": "token_mean"},
            "loss 'dppo': divergence='js': expected one of tv",
        ),
        ("grpo", {"ddof": 2}, "ddof=2 of advantage method 'mean_std': expected 0 .population. or 1"),
        ("grpo", {"kl_coef": 0.1}, "kl_coef has no effect.*it belongs to kl 'k1'"),
        ("grpo", {"kl": "k4"}, "kl='k4' does not exist; did you mean k1"),
        ("grpo", {"advantage": "means"}, "advantage='means' does not exist; did you mean mean"),
        ("grpo", {"aggregation": "token_men"}, "aggregation='token_men' does not exist; did you mean token_mean"),
        ("grpo", {"loss": "pppo"}, "loss 'pppo' does not exist; did you mean ppo"),
        ("grpo", {"correction": "token_clip"}, "correction='token_clip' does not exist; did you mean token_mask"),
        ("grpo", {"entropy": "fix"}, "entropy='fix' does not exist; did you mean fixed"),
        ("grpo", {"anchor": "new"}, "anchor='new' does not exist; did you mean sampler"),
        ("grpo", {"aggregation_constant": 5}, "uses no constant, so constant=5.0 would have no effect"),
        ("dr_grpo", {}, "divides by a constant length"),
        ("dr_grpo", {"aggregation_constant": "long"}, "aggregation_constant='long': expected a number"),
        ("grpo", {"observation_coef": -1}, "observation_coef=-1: expected a number of at least 0"),
        ("reinforce", {"anchor": "old"}, "anchor=old has no effect: loss 'reinforce' has no ratio to an anchor"),
        ("importance_sampling", {"correction": "token_mask"}, "would count twice: the ratio of loss 'importance_sampl"),
        ("ppo", {"correction": "token_mask", "anchor": "sampler"}, "with anchor=sampler would count twice"),
        ("reverse_kl", {"kl": "k3"}, "would count the reference twice"),
        ("ppo", {"loss": "cross_entropy", "kl": "advantage"}, "does not learn from them"),
        ("grpo", {"loss": "cross_entropy", "ddof": 0}, "no knob of advantage=mean_std has an effect"),
        ("ppo", {"loss": "dpo", "kl": "k3"}, "would count the reference twice"),
        ("ppo", {"loss": "dpo", "correction": "token_mask"}, "does not correct for who sampled"),
        ("tis", {"correction": "token_mask+token_mask"}, "names a factor twice, which would square it"),
        ("tis", {"weight_min": 3}, "weight_min=3.0 is above weight_max=2.0, so that nothing lies between"),
        ("ppo", {"advantage": "zero"}, "advantage=zero with loss 'ppo' learns nothing"),
        ("rloo_clip", {"advantage": "pass_at_k"}, "a penalty would decide that"),
        ("dual_clip", {"dual_clip_ratio": 0.5}, "dual_clip_ratio=0.5: expected a number of at least 1, or inf"),
        ("sapo", {"tau_positive": 0}, "tau_positive=0: expected a number above 0"),
        ("kl_cov", {"covariance_share": 7}, "covariance_share=7: expected a number above 0 and at most 1"),
        ("grpo_kl", {"kl_coef": float("inf")}, "kl_coef=inf: expected a number above 0"),
        ("grpo", {"kl": "advantage", "kl_discount": 3}, "kl_discount=3: expected a number of at least 0 and at most 1"),
        ("grpo", {"entropy": "adaptive", "entropy_coef": 5}, "entropy_coef=5.0 is above entropy_coef_max=0.1"),
        ("grpo", {"entropy": "fixed", "entropy_coef": True}, "entropy_coef=True: expected a number"),
        ("ppo", {"advantage": "moving_baseline", "kl": "reward"}, "the baseline moves with the rewards that the envs"),
    ],
)
def test_I12_what_makes_no_sense_is_refused_with_the_reason(row: str, config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(variant(row), config)


def test_I12_unknown_rows() -> None:
    with pytest.raises(ValueError, match=r"loss_fn='grop' is unknown; did you mean grpo.*package.module:function"):
        variant("grop")


def test_an_override_of_a_part_takes_the_knobs_of_the_old_one_with_it() -> None:
    """The row's own knobs are defaults of its parts, and go with them; a user's never do."""
    algorithm = resolve(variant("grpo_kl"), {"kl": "none"})
    assert not algorithm.reads_reference
    assert resolve(variant("luspo"), {"loss": "reinforce"}).objective.loss.knobs == {}
    with pytest.raises(ValueError, match="kl_coef has no effect"):
        resolve(variant("grpo_kl"), {"kl": "none", "kl_coef": 0.1})


@pytest.mark.parametrize(
    ("row", "config", "knob"),
    [
        ("dapo", {"loss": "gspo"}, "clip_high_threshold"),
        ("luspo", {"loss": "ppo"}, "clip_low_threshold"),
        ("dppo_kl", {"loss": "prime_rl"}, "divergence_low"),
    ],
)
def test_a_loss_that_replaces_the_rows_has_its_own_defaults(row: str, config: dict, knob: str) -> None:
    """Else DAPO with GSPO's form would clip at 1.28, which nobody published and nobody asked for."""
    assert knob not in resolve(variant(row), {**config, "aggregation": "token_mean"}).objective.loss.knobs


def test_a_factor_that_replaces_the_rows_has_its_own_defaults() -> None:
    correct = resolve(variant("decoupled_ppo"), {"correction": "sequence_mask"}).objective.correct
    assert correct is not None
    assert correct.args[0][0].keywords == {}


def test_a_correction_anchors_the_ratio_to_the_old_policy() -> None:
    objective = resolve(variant("grpo"), {"correction": "token_truncate"}).objective
    assert objective.loss.columns == ("logp_old", "correction")
    assert objective.reads_old
    assert resolve(variant("reinforce"), {"correction": "token_truncate"}).objective.loss.columns == ("correction",)


def squared(t: TokenInputs, *, strength: float = 2.0) -> FormResult:
    return strength * t.advantage * t.log_ratio**2, jnp.zeros_like(t.mask)


def test_a_form_of_ones_own_is_a_row() -> None:
    row = own_variant("mine:squared", squared)
    objective = resolve(row, {"strength": 3.0, "aggregation": "token_sum", "kl": "k2"}).objective
    x, q, mask = jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0]), jnp.array([True, False])
    out = objective.loss(TokenInputs(x, q, jnp.ones(2), mask, logp_ref=x))
    np.testing.assert_allclose(out.loss, [3.0 * 0.25, 0.0])
    with pytest.raises(ValueError, match="loss 'squared': strength=inf: expected a finite number"):
        resolve(row, {"strength": float("inf")})
    for form, message in (
        (lambda t, *, strength: None, "has no default for strength"),
        (lambda t, *, anchor=1.0: None, "a knob called 'anchor', which is a part"),
    ):
        with pytest.raises(ValueError, match=message):
            own_variant("mine:form", form)
    assert own_variant("mine:row", LossRow(squared)).loss == LossRow(squared)
    whole = Variant("mean_std", "ppo", "token_mean", "mine")
    assert own_variant("mine:whole", whole) is whole
    with pytest.raises(ValueError, match="expected a Variant, a LossRow or a function of tokens"):
        own_variant("mine:three", 3)


def test_corrections_want_old_log_probs() -> None:
    correct = resolve(variant("tis"), {}).objective.correct
    assert correct is not None
    with pytest.raises(ValueError, match="group 0, episode 0 has no old log-probs: score the batch"):
        correct([replace(d, logprobs_old=None) for d in ragged()])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_row_can_be_explained(name: str) -> None:
    parts = explain(VARIANTS[name], constant(VARIANTS[name].aggregation))
    assert [p.kind for p in parts][:2] == ["advantage", "loss"]
    assert [p.kind for p in parts][-2:] == ["aggregation", "anchor"]
    assert all(p.says.strip() for p in parts)


def test_an_explanation_shows_the_knobs_as_they_are_set() -> None:
    knobs = {p.kind: p.knobs for p in explain(variant("dapo"), {"kl": "k3", "kl_coef": 0.2, "ddof": 0})}
    assert knobs["loss"] == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
    assert knobs["kl"] == {"kl_coef": 0.2}
    assert knobs["advantage"]["ddof"] == 0
    with pytest.raises(ValueError, match="kl_coef has no effect"):
        explain(variant("dapo"), {"kl_coef": 0.2})


@pytest.mark.parametrize("name", LOSSES)
def test_a_form_says_its_formula_and_where_it_comes_from(name: str) -> None:
    says = LOSSES[name].form.__doc__ or ""
    assert says.startswith(("-", "PPO", "GSPO", "On-policy", "sg")), "the formula comes first"
    assert any(mark in says for mark in ("arXiv", "doi", "Tinker", "SkyRL", "prime-rl", "UniRL")), says
