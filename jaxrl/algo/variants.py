"""Published algorithms as rows: an advantage, a loss form, an aggregation, what keeps the policy near a reference, what
is made of the mismatch between sampler and trainer, and where it was published.

Knows names; `algorithm.py` makes something to train with of a row. Never a branch: an algorithm that does not fit a row
needs a new row in one of the tables, not an `if`.
"""

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, cast

from jaxrl.algo.knobs import Value, knobs_of
from jaxrl.algo.loss import Form, LossRow

Config = Mapping[str, Value]


PARTS = ("advantage", "loss", "aggregation", "kl", "correction", "anchor", "entropy")
"""What `loss_fn_config` can name, beside knobs; two more keys are numbers: aggregation_constant, observation_coef."""


@dataclass(frozen=True)
class Variant:
    """One row. `loss_fn_config` holds the knobs, of any part, that differ from their defaults.

    loss: a name of `LOSSES`, or a row of one's own. kl: a name of `KL_LOSSES` (in the loss), of `KL_PENALTIES` (in the
    advantages), or "reward". correction: names of `CORRECTIONS`, joined by "+". anchor: what the form's ratio is
    against: the sampler's recorded log-probs, or those of the policy before the batch, scored anew. entropy: a name of
    `ENTROPY_BONUSES`.
    """

    advantage: str
    loss: str | LossRow
    aggregation: str
    paper: str
    kl: str | None = None
    correction: str | None = None
    anchor: Literal["sampler", "old"] = "sampler"
    entropy: str | None = None
    loss_fn_config: Config = field(default_factory=dict)


_DPPO = "arXiv 2602.04879"
_COVARIANCE = "arXiv 2505.22617"

VARIANTS: dict[str, Variant] = {
    "importance_sampling": Variant(
        "mean", "importance_sampling", "token_sum", "tinker-docs.thinkingmachines.ai/losses"
    ),
    "ppo": Variant("mean", "ppo", "token_sum", "arXiv 1707.06347"),
    "dual_clip": Variant("mean_std", "dual_clip", "token_mean", "arXiv 1912.09729"),
    "reinforce": Variant("mean", "reinforce", "token_mean", "doi 10.1007/BF00992696"),
    "rloo": Variant("leave_one_out", "reinforce", "seq_mean_token_sum", "arXiv 2402.14740"),
    "rloo_clip": Variant(
        "leave_one_out",
        "sequence_ppo",
        "seq_mean_token_sum",
        "TRL, RLOOTrainer",
        kl="reward",
        loss_fn_config={"kl_coef": 0.05},
    ),
    "reinforce_pp": Variant(
        "reward", "ppo", "token_mean", "arXiv 2501.03262", kl="advantage_whitened", loss_fn_config={"kl_coef": 1e-3}
    ),
    "turn_ppo": Variant("critic", "ppo", "token_mean", "arXiv 2512.17008"),
    "opo": Variant("opo", "reinforce", "token_mean", "arXiv 2505.23585"),
    "gpg": Variant("gpg", "reinforce", "token_mean", "arXiv 2504.02546"),
    "maxrl": Variant("maxrl", "importance_sampling", "token_mean", "arXiv 2602.02710"),
    "grpo": Variant("mean_std", "ppo", "seq_mean_token_mean", "arXiv 2402.03300"),
    "grpo_kl": Variant(
        "mean_std", "ppo", "seq_mean_token_mean", "arXiv 2402.03300", kl="k3", loss_fn_config={"kl_coef": 0.04}
    ),
    "dr_grpo": Variant("mean", "ppo", "seq_mean_token_sum_norm", "arXiv 2503.20783"),
    "dapo": Variant("mean_std", "ppo", "token_mean", "arXiv 2503.14476", loss_fn_config={"clip_high_threshold": 1.28}),
    "lite_ppo": Variant("batch_std", "ppo", "token_mean", "arXiv 2508.08221"),
    "gspo": Variant("mean_std", "gspo", "seq_mean_token_mean", "arXiv 2507.18071"),
    "gspo_token": Variant("mean_std", "gspo_token", "seq_mean_token_mean", "arXiv 2507.18071"),
    "luspo": Variant(
        "mean_std",
        "gspo",
        "seq_mean_token_sum",
        "arXiv 2602.05261",
        loss_fn_config={"clip_low_threshold": 1 - 2e-3, "clip_high_threshold": 1 + 2.5e-3},
    ),
    "gmpo": Variant("mean_std", "gmpo", "seq_mean_token_mean", "arXiv 2507.20673"),
    "sapo": Variant("mean_std", "sapo", "seq_mean_token_mean", "arXiv 2511.20347"),
    "vespo": Variant("mean_std", "vespo", "token_mean", "arXiv 2602.10693"),
    "cispo": Variant("mean_std", "cispo", "token_mean", "arXiv 2506.13585"),
    "scalerl": Variant("batch_std", "cispo", "prompt_mean", "arXiv 2510.13786"),
    "rollout_is": Variant("mean_std", "rollout_is", "token_mean", "SkyRL, rollout_is"),
    "minirl": Variant(
        "mean",
        "masked_pg",
        "token_mean",
        "arXiv 2512.01374",
        anchor="old",
        loss_fn_config={"ratio_max": float("inf")},
    ),
    "dppo": Variant("mean", "dppo", "seq_mean_token_sum_norm", _DPPO, loss_fn_config={"divergence": "tv"}),
    "dppo_kl": Variant(
        "mean",
        "dppo",
        "seq_mean_token_sum_norm",
        _DPPO,
        loss_fn_config={"divergence": "kl", "divergence_low": 0.05, "divergence_high": 0.05},
    ),
    "prime_rl": Variant("mean", "prime_rl", "token_mean", "prime-rl, default loss"),
    "ipo": Variant("mean", "ipo", "token_mean", "prime-rl, ipo loss"),
    "dro": Variant("mean", "dro", "token_sum", "arXiv 2405.19107"),
    "kimi": Variant("mean", "kimi", "seq_mean_token_sum", "arXiv 2501.12599"),
    "drpo": Variant("mean", "drpo", "token_mean", "UniRL, AdaSPO"),
    "topr": Variant("mean", "topr", "token_mean", "arXiv 2503.14286"),
    "topr_token": Variant("mean", "topr_token", "token_mean", "ROLL, topr"),
    "opsm": Variant("mean_std", "opsm", "token_mean", "arXiv 2512.02556"),
    "m2po": Variant("mean_std", "m2po", "token_mean", "arXiv 2510.01161"),
    "clip_cov": Variant("mean_std", "clip_cov", "token_mean", _COVARIANCE),
    "kl_cov": Variant("mean_std", "kl_cov", "token_mean", _COVARIANCE),
    "tis": Variant("mean_std", "ppo", "token_mean", "fengyao.notion.site", correction="token_truncate", anchor="old"),
    "icepop": Variant("mean_std", "ppo", "token_mean", "arXiv 2510.18855", correction="token_mask", anchor="old"),
    "decoupled_ppo": Variant(
        "mean_std",
        "ppo",
        "token_mean",
        "arXiv 2505.24298",
        correction="token_truncate",
        anchor="old",
        loss_fn_config={"weight_max": float("inf")},
    ),
    "geometric_mask": Variant(
        "mean_std", "ppo", "token_mean", "SkyRL, geometric mask", correction="geometric_mask", anchor="old"
    ),
    "distillation": Variant(
        "zero",
        "importance_sampling",
        "token_sum",
        "thinkingmachines.ai/blog/on-policy-distillation",
        kl="advantage",
        loss_fn_config={"kl_coef": 1.0},
    ),
    "reverse_kl": Variant("zero", "reverse_kl", "token_mean", "prime-rl, ref_kl"),
}


def variant(name: str) -> Variant:
    """The row of that name. Raises ValueError with the nearest names."""
    if name not in VARIANTS:
        close = difflib.get_close_matches(name, VARIANTS) or sorted(VARIANTS)
        raise ValueError(
            f"loss_fn={name!r} is unknown; did you mean {', '.join(close)}? A function of your own is given "
            "as package.module:function"
        )
    return VARIANTS[name]


def own_variant(name: str, given: object) -> Variant:
    """The row for something of the user's: a Variant, a LossRow, or a form, a function (tokens, *, knobs).

    A form is taken to be anchored, and gets mean-centred advantages and a mean over tokens.
    """
    if isinstance(given, Variant):
        return given
    if not isinstance(given, LossRow) and not callable(given):
        raise ValueError(f"loss_fn={name!r} is {given!r}; expected a Variant, a LossRow or a function of tokens")
    row = given if isinstance(given, LossRow) else LossRow(cast(Form, given), anchored=True)
    knobs = knobs_of(*row.functions)
    if bare := [knob for knob, default in knobs.items() if default is inspect.Parameter.empty]:
        raise ValueError(f"loss_fn={name!r} has no default for {', '.join(bare)}: a knob is a keyword with a default")
    if taken := [knob for knob in knobs if knob in PARTS]:
        raise ValueError(f"loss_fn={name!r} has a knob called {taken[0]!r}, which is a part; rename it")
    return Variant("mean", row, "token_mean", name)
