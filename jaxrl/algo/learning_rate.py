"""A learning rate to start from, by the size and family of a model.

The rule is that of Tinker's cookbook, fitted there to the best rates of supervised and RL runs with LoRA:

    rate = 5e-5 * 10 * (2000 / width) ** p        p = 0.0775 for Qwen, 0.781 for Llama

and a tenth of it for all weights, since an adapter wants about ten times their rate (Schulman et al. 2025, "LoRA
without regret"). It does not depend on the rank. Knows sizes, nothing about optimizers; a place to start, not a law: a
tiny model that the rule was never fitted to, such as this project's own, learns with less.
"""

from jaxrl.models.config import ModelConfig

_EXPONENTS = {"qwen": 0.0775, "llama": 0.781}


def suggested_learning_rate(model: ModelConfig, *, lora: bool) -> float:
    """Peak rate of Adam for this model; a batch k times as large bears about sqrt(k) times as much."""
    return 5e-5 * (10 if lora else 1) * (2000 / model.width) ** _EXPONENTS[_family(model)]


def _family(model: ModelConfig) -> str:
    """Qwen has biases in front of attention, or norms in it; a Llama has neither."""
    return "qwen" if model.qkv_bias or model.qk_norm else "llama"
