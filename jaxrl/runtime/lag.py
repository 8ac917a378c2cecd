"""A sampler that is not the trainer, on purpose: weights some steps old, weights with noise, as a fixed setting.

In an asynchronous run the age of a token is what the machine made of it. Here it is an independent variable: step s
samples with the weights of step max(s - steps_behind, 0), and the same run gives the same tokens anywhere. Knows
adapters, step numbers and keys. Must not know the engine, nor when anything is published.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.runtime.weights import Weights, place_alike, snapshot


@dataclass(frozen=True)
class SamplerGap:
    """How far the sampler is from the trainer.

    steps_behind: steps, of a batch each, between the weights that sample and those that are trained (fewer at the
    start). noise: standard deviation of Gaussian noise on every array of the sampling adapter, relative to the root
    mean square of that array; drawn anew every step. An adapter that was never trained has B = 0, which noise leaves
    as it is, so the first step's samples are those of the base.
    """

    steps_behind: int = 0
    noise: float = 0.0

    def __post_init__(self) -> None:
        if self.steps_behind < 0:
            raise ValueError(f"sampler_gap.steps_behind={self.steps_behind}: expected 0 or more steps")
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"sampler_gap.noise={self.noise}: expected a finite number, 0 or more")
        if not self.steps_behind and not self.noise:
            raise ValueError(
                "sampler_gap has no effect with steps_behind=0 and noise=0: give one of them, or leave sampler_gap out"
            )


class Lag:
    """Owns the adapters of the last `steps_behind` steps: that many copies on the device, and one more.

    Its method blocks on the device and is called through the run's limiter, once a step, steps in order from 0:
    what is kept is not checkpointed, so a run with a gap cannot be resumed.
    """

    def __init__(self, gap: SamplerGap, *, seed: int) -> None:
        self._gap, self._seed = gap, seed
        self._kept: list[Weights] = []  # of versions self._first, self._first + 1, ...
        self._first = 0

    @property
    def step(self) -> int:
        """The step that samples now, whatever the age of its weights."""
        return self._first + len(self._kept) - 1

    def sampling(self, weights: Weights, step: int) -> tuple[Weights, int]:
        """What step `step` samples with, and its version, given the weights that it trains.

        Errors: ValueError for weights without an adapter, and for a step out of order.
        """
        if weights.adapter is None:
            raise ValueError("sampler_gap keeps past adapters, and these weights have none: train a LoRA")
        if step != self.step + 1:
            raise ValueError(
                f"sampler_gap: step {step} comes after step {self.step}; past weights are "
                "not checkpointed, so the steps of a run with a gap go from 0 on without a break"
            )
        # An adapter that only serves this step may be the live one: nobody samples once the update has begun.
        self._kept.append(snapshot(weights) if self._gap.steps_behind else weights)
        while len(self._kept) > self._gap.steps_behind + 1:
            del self._kept[0]
            self._first += 1
        old, version = self._kept[0], self._first
        if not self._gap.noise:
            return old, version
        noisy = perturbed(old.adapter, noise_key(self._seed, step), self._gap.noise)
        return Weights(old.params, place_alike(noisy, weights, "sampler_gap.noise")), version


_STREAM = 0x1A6  # keeps this key apart from other uses of the run's seed


def noise_key(seed: int, step: int) -> jax.Array:
    """The key of the noise that step `step` of the run `seed` samples with (I7)."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _STREAM), step)


@jax.jit
def perturbed(adapter: Any, key: jax.Array, noise: float) -> Any:
    """The adapter with noise * RMS(x) * N(0, 1) added to every array x."""
    leaves, structure = jax.tree.flatten(adapter)
    ends = np.cumsum([x.size for x in leaves])
    # One draw for all arrays: a generator for each takes seconds to compile.
    draws = jnp.split(jax.random.normal(key, (int(ends[-1]),), jnp.float32), ends[:-1])

    def shifted(x: jax.Array, draw: jax.Array) -> jax.Array:
        size = jnp.asarray(noise, jnp.float32) * jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))
        return (x + size * draw.reshape(x.shape)).astype(x.dtype)

    return jax.tree.unflatten(structure, [shifted(x, d) for x, d in zip(leaves, draws, strict=True)])
