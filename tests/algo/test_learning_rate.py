"""The suggested learning rate: by hand, and what it may depend on."""

from dataclasses import replace

import pytest

from jaxrl.algo.learning_rate import suggested_learning_rate
from jaxrl.models.config import tiny

LLAMA = replace(tiny(96), width=2000)
QWEN = replace(LLAMA, qk_norm=True)


@pytest.mark.parametrize(
    ("model", "lora", "rate"),
    [
        (LLAMA, True, 5e-4),
        (LLAMA, False, 5e-5),
        (QWEN, True, 5e-4),
        (replace(LLAMA, width=4096), True, 5e-4 * 0.48828125**0.781),
        (replace(QWEN, width=4096), True, 5e-4 * 0.48828125**0.0775),
        (replace(LLAMA, width=4096, qkv_bias=True), True, 5e-4 * 0.48828125**0.0775),
    ],
)
def test_by_hand(model, lora: bool, rate: float) -> None:
    assert suggested_learning_rate(model, lora=lora) == pytest.approx(rate)


def test_wider_models_learn_slower_and_depth_does_not_matter() -> None:
    rates = [suggested_learning_rate(replace(LLAMA, width=w), lora=True) for w in (512, 2048, 8192)]
    assert rates == sorted(rates, reverse=True)
    assert suggested_learning_rate(replace(LLAMA, layers=80), lora=True) == pytest.approx(5e-4)
