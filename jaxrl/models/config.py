"""What a decoder is: the numbers and switches that determine its function, and nothing else.

Knows no file format (`hf.py` and `gguf.py` translate theirs into this) and holds no arrays.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every frequency divided by `factor` (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's frequency-dependent interpolation: long wavelengths divided by `factor`, short ones kept."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


RopeScaling = LinearScaling | Llama3Scaling | None


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder of the Llama / Qwen2 / Qwen3 families. Letters are those of the shape suffixes."""

    vocab_size: int  # V
    width: int  # M
    ff_width: int  # F
    layers: int  # L
    heads: int  # H
    kv_heads: int  # K
    head_width: int  # C
    max_positions: int  # the longest sequence the model was made for, prompt and answer together
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # one per layer: how many latest positions it sees; () is None for all

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.head_width % 2:
            raise ValueError(f"head_width={self.head_width} is odd, but rotary embeddings turn pairs of channels")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"windows has {len(self.windows)} entries for layers={self.layers}; give one per layer")

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """One window a layer, None where the layer sees everything."""
        return self.windows or (None,) * self.layers

    @property
    def kv_width(self) -> int:
        """Numbers per position of K (or V) in one layer."""
        return self.kv_heads * self.head_width


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Angle per position of each channel pair, float32 [C/2] (Su et al. 2021, arXiv 2104.09864)."""
    pairs = np.arange(0, config.head_width, 2, dtype=np.float64) / config.head_width
    freqs = config.rope_theta**-pairs
    match config.rope_scaling:
        case None:
            pass
        case LinearScaling(factor):
            freqs = freqs / factor
        case Llama3Scaling(factor, low, high, original):
            wavelengths = 2 * math.pi / freqs
            kept = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
            freqs = kept * freqs + (1 - kept) * freqs / factor
    return freqs.astype(np.float32)


def tiny(vocab_size: int, *, layers: int = 3, width: int = 192, max_positions: int = 1024) -> ModelConfig:
    """A Llama of a few million parameters, small enough to train from nothing on a laptop."""
    return ModelConfig(
        vocab_size=vocab_size,
        width=width,
        ff_width=3 * width,
        layers=layers,
        heads=width // 32,
        kv_heads=width // 64,
        head_width=32,
        max_positions=max_positions,
        tie_embeddings=True,
    )
