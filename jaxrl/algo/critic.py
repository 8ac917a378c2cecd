"""The value of a turn: a linear head on the policy's own hidden state, and how it learns what turns came to.

Knows the model's forward pass, packed batches and Adam. Must not know rewards, episodes or losses: whoever calls it
has targets already (`jaxrl.runtime.loop.value_targets`). The trunk is the policy's as it is, never differentiated
through: what a turn looks like is read once, before the step, and the head alone is fitted to it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Float

from jaxrl.algo.advantage import CriticFit
from jaxrl.algo.batch import Batch, choose_width, datum_values, pack
from jaxrl.algo.data import TurnStarts
from jaxrl.algo.members import informative
from jaxrl.algo.optimizer import OptimizerConfig, make_transform
from jaxrl.algo.scoring import Scoring, micro_batch
from jaxrl.models.sharding import replicated
from jaxrl.models.spec import Params

FEWEST_TURNS = 8
"""Numbers of turns are rounded up to a power of two, from here on, so that there are few programs."""

NORM_EPS = 1e-6

_ADAM: Any = make_transform(OptimizerConfig(b2=0.999, max_grad_norm=None))

TurnFeatures = Callable[[Any, Params | None, Batch, Any], jax.Array]
Fit = Callable[["Critic", Any, Any, Any], "Critic"]


@struct.dataclass
class Head:
    """weights: float32, one for each channel. bias: float32, no dimensions."""

    weights: Any
    bias: Any


@struct.dataclass
class Critic:
    """What a run keeps of its critic, part of its training state. moments: Adam's."""

    head: Head
    moments: Any


def init_critic(width: int) -> Critic:
    """A head that says 0 of everything, so that the advantages of a first step are returns without a baseline."""
    head = Head(jnp.zeros(width, jnp.float32), jnp.zeros((), jnp.float32))
    return Critic(head, _ADAM.init(head))


def predict(head: Head, features_NM: Any) -> Any:
    """values_N: the mean over the channels of weight times feature, and the bias. Of numpy or JAX arrays.

    A mean and not a sum: then an update of Adam moves a value by about the learning rate, however wide the model is.
    """
    return (features_NM * head.weights).mean(-1) + head.bias


# --- what a turn looks like ----------------------------------------------------------------------


@dataclass(frozen=True)
class PackedTurns:
    """A batch of contexts, and where their turns are.

    turns_NBK: positions in each row that predict the first token of a turn, and 0 to fill up, int32. slots: for each
    turn of the `TurnStarts`, in their order, its place in the flattened turns_NBK.
    """

    batch: Batch
    turns_NBK: np.ndarray
    slots: np.ndarray


def pack_turns(starts: TurnStarts, *, widths: Sequence[int], rows: int) -> PackedTurns:
    """The contexts packed as any datums are, with as many turns a row as the fullest has, rounded up."""
    unweighted_D = [np.zeros(len(d.tokens)) for d in starts.data_D]
    batch = pack(starts.data_D, unweighted_D, width=choose_width(starts.data_D, widths), rows=rows)
    mask_NBT = np.asarray(batch.mask)
    most = bucket(int(mask_NBT.sum(-1).max(initial=0)))
    turns_NBK = np.zeros((*mask_NBT.shape[:2], most), np.int32)
    slots_NBT = np.zeros(mask_NBT.shape)
    n, b, t = np.nonzero(mask_NBT)
    k = np.cumsum(mask_NBT, -1)[n, b, t] - 1
    turns_NBK[n, b, k] = t
    slots_NBT[n, b, t] = np.ravel_multi_index((n, b, k), turns_NBK.shape)
    slots_D = datum_values(slots_NBT, starts.data_D)  # float32, which counts to 2**24 turns
    slots = np.array([slots_D[d][token] for d, token in starts.turns], np.int64)
    return PackedTurns(batch, turns_NBK, slots)


def make_turn_features(scoring: Scoring) -> TurnFeatures:
    """features(params, base, batch, turns_NBK) -> features_NBKM: float32, jitted, of root mean square 1 over M.

    The hidden state before the final norm at these positions, which has seen the whole context of the turn and no
    token of its action. Compiled once per shape. With a mesh, the result is whole on every device.
    """

    def run(params: Any, base: Params | None, batch: Batch, turns_NBK: jax.Array) -> jax.Array:
        def body(i: jax.Array, features_NBKM: jax.Array) -> jax.Array:
            micro, turns_BK = micro_batch((batch, turns_NBK), i)
            hidden_BTM = scoring.hidden(params, base, micro)
            features_BKM = _normalised(jnp.take_along_axis(hidden_BTM, turns_BK[..., None], axis=1))
            return lax.dynamic_update_index_in_dim(features_NBKM, features_BKM, i, 0)

        empty = jnp.zeros((*turns_NBK.shape, scoring.model.width), jnp.float32)
        return lax.fori_loop(0, batch.count, body, empty)

    return jax.jit(run, out_shardings=None if scoring.mesh is None else replicated(scoring.mesh))


def _normalised(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + NORM_EPS)


# --- how the head learns -------------------------------------------------------------------------


def make_fit(config: CriticFit, *, mesh: Any = None) -> Fit:
    """fit(critic, features_NM, targets_N, weights_N) -> critic: `epochs` updates on all turns at once, jitted.

    They lower the mean squared error, sum(weight * error^2). Compiled once per number of turns.
    """

    def error(head: Head, features_NM: jax.Array, targets_N: jax.Array, weights_N: jax.Array) -> jax.Array:
        return jnp.sum(weights_N * (predict(head, features_NM) - targets_N) ** 2)

    def fit(critic: Critic, features_NM: jax.Array, targets_N: jax.Array, weights_N: jax.Array) -> Critic:
        def epoch(_: jax.Array, critic: Critic) -> Critic:
            gradient = jax.grad(error)(critic.head, features_NM, targets_N, weights_N)
            direction, moments = _ADAM.update(gradient, critic.moments, critic.head)
            head = jax.tree.map(lambda p, u: p - config.learning_rate * u, critic.head, direction)
            return Critic(head, moments)

        return lax.fori_loop(0, config.epochs, epoch, critic)

    if mesh is None:
        return jax.jit(fit)
    return jax.jit(fit, in_shardings=replicated(mesh), out_shardings=replicated(mesh))


def padded(
    features_NM: Float[np.ndarray, "N M"], targets_N: Float[np.ndarray, " N"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, targets and weights for a fit, filled up to a bucket with turns of weight 0. float32."""
    count = len(targets_N)
    more = bucket(count) - count
    weights_N = np.full(count, 1 / max(count, 1), np.float32)
    return (
        np.pad(features_NM.astype(np.float32), ((0, more), (0, 0))),
        np.pad(targets_N.astype(np.float32), (0, more)),
        np.pad(weights_N, (0, more)),
    )


def fit_metrics(values_N: Float[np.ndarray, " N"], targets_N: Float[np.ndarray, " N"]) -> dict[str, float]:
    """How good the values of a batch were, before the fit to its targets; of no turns, nothing.

    critic/loss: the mean squared error. critic/explained_variance: 1 - var(error) / var(target), 0 for a constant
    value; left out where the targets agree. critic/value_mean: in units of reward.
    """
    if not len(values_N):
        return {}
    errors_N = targets_N - values_N
    metrics = {"critic/loss": float(np.mean(errors_N**2)), "critic/value_mean": float(values_N.mean())}
    if informative(targets_N):
        metrics["critic/explained_variance"] = float(1 - errors_N.var() / targets_N.var())
    return metrics


def bucket(count: int) -> int:
    """The next power of two, at least `FEWEST_TURNS`."""
    return max(FEWEST_TURNS, 1 << max(count - 1, 0).bit_length())
