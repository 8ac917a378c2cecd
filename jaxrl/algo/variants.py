"""Published algorithms as rows: an advantage, a loss form, an aggregation, a KL term, and where it was published.

Knows names only; `check_variants` in the tests proves that each of them exists. Never a branch: an algorithm that
does not fit a row needs a new row in one of the tables, not an `if`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Variant:
    """One row. `loss_fn_config` holds the knobs that differ from the loss's defaults."""

    advantage: str
    loss: str
    aggregation: str
    paper: str
    kl: str | None = None
    loss_fn_config: Mapping[str, float] = field(default_factory=dict)


VARIANTS: dict[str, Variant] = {
    "importance_sampling": Variant(
        "mean", "importance_sampling", "token_sum", "tinker-docs.thinkingmachines.ai/losses"
    ),
    "ppo": Variant("mean", "ppo", "token_sum", "arXiv 1707.06347"),
    "reinforce": Variant("mean", "reinforce", "token_mean", "doi 10.1007/BF00992696"),
    "rloo": Variant("leave_one_out", "reinforce", "seq_mean_token_sum", "arXiv 2402.14740"),
    "grpo": Variant("mean_std", "ppo", "seq_mean_token_mean", "arXiv 2402.03300"),
    "dr_grpo": Variant("mean", "ppo", "seq_mean_token_sum_norm", "arXiv 2503.20783"),
    "dapo": Variant("mean_std", "ppo", "token_mean", "arXiv 2503.14476", loss_fn_config={"clip_high_threshold": 1.28}),
}
