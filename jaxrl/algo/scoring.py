"""How a micro-batch goes through the model: its hidden states, and the log-probs of its targets.

Knows the model, LoRA, the mesh and the packed batch. Must not know losses, optimizers or critics: what is made of a
forward pass is theirs, and all of them share this one, which is that of the sampler too (I3).
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jaxrl.algo.batch import Batch
from jaxrl.algo.logprob import action_logprobs
from jaxrl.models import sharding
from jaxrl.models.config import ModelConfig
from jaxrl.models.forward import hidden_states
from jaxrl.models.lora import LoraConfig
from jaxrl.models.spec import Params

HEAD_CHUNK = 128
"""Positions of a row whose logits exist at one time."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Scoring:
    """The static half of every function that runs the model on a batch.

    temperature: that of the log-probs. remat: whether a backward pass computes activations again. head_chunk:
    positions of a row whose logits exist at one time. compute_dtype: what float32 parameters are cast to for the
    forward pass under full fine-tuning.
    """

    model: ModelConfig
    lora: LoraConfig | None
    temperature: float
    mesh: Mesh | None = None
    remat: bool = False
    head_chunk: int = HEAD_CHUNK
    compute_dtype: Any = None

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature={self.temperature}: log-probs need one above 0, the one the sampler used; greedy "
                "samples have no log-prob to train on"
            )
        if self.lora is not None and self.compute_dtype is not None:
            raise ValueError("compute_dtype has no effect under LoRA: the base is used in the dtype it has")
        if self.head_chunk < 1:
            raise ValueError(f"head_chunk={self.head_chunk}: expected at least 1 position")

    def hidden(self, params: Any, base: Params | None, micro: Batch) -> jax.Array:
        """hidden_BTM before the final norm, of one micro-batch, arrays [B, T]."""
        return self._hidden(*self._split(params, base), micro)

    def logprobs(
        self, params: Any, base: Params | None, micro: Batch, *, entropy_gradient: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        """(logp_BT, entropy_BT) of one micro-batch, arrays [B, T], at its trained and observed targets."""
        weights, adapter = self._split(params, base)
        return action_logprobs(
            weights,
            self._hidden(weights, adapter, micro),
            micro.targets,
            micro.mask if micro.observed is None else micro.mask | (micro.observed > 0),
            config=self.model,
            temperature=self.temperature,
            chunk=self.head_chunk,
            entropy_gradient=entropy_gradient,
        )

    def all_logprobs(self, params: Any, base: Params | None, batch: Batch) -> jax.Array:
        """logp_NBT of all real micro-batches, 0 elsewhere."""

        def body(i: jax.Array, logp_NBT: jax.Array) -> jax.Array:
            logp_BT, _ = self.logprobs(params, base, micro_batch(batch, i))
            return lax.dynamic_update_index_in_dim(logp_NBT, logp_BT.astype(logp_NBT.dtype), i, 0)

        return lax.fori_loop(0, batch.count, body, jnp.zeros(batch.tokens.shape, jnp.float32))

    def _split(self, params: Any, base: Params | None) -> tuple[Params, Any]:
        """The weights of the model, and the adapter beside them where there is one."""
        if self.lora is None:
            return cast(params, self.compute_dtype), None
        assert base is not None, "LoRA adapts a base: pass its parameters"
        return base, params

    def _hidden(self, weights: Params, adapter: Any, micro: Batch) -> jax.Array:
        return hidden_states(
            self._lookup_ready(weights),
            adapter,
            micro.tokens,
            micro.positions,
            micro.segments,
            config=self.model,
            lora_scale=1.0 if self.lora is None else self.lora.scale,
            remat=self.remat,
            constrain=self._constrain,
        )

    def _lookup_ready(self, weights: Params) -> Params:
        """The embedding gathered along its width: looking up rows of half a width makes XLA replicate the result."""
        if self.mesh is None:
            return weights
        table = lax.with_sharding_constraint(weights["embed"], named_sharding(self.mesh, ("vocab", None)))
        return weights | {"embed": table}

    def _constrain(self, x_BTM: jax.Array) -> jax.Array:
        if self.mesh is None:
            return x_BTM
        return lax.with_sharding_constraint(x_BTM, named_sharding(self.mesh, ("batch", None, None)))


def cast(params: Params, dtype: Any) -> Params:
    """The parameters as a forward pass in `dtype` uses them, sharded as they are; the very same for None."""
    return params if dtype is None else jax.tree.map(lambda x: x.astype(dtype), params)


def micro_batch(batch: _T, index: jax.Array) -> _T:
    """Micro-batch `index`: the same tree with arrays [B, T]."""
    pick = lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False) if x.ndim else x  # noqa: E731
    return jax.tree.map(pick, batch)


def named_sharding(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """Where an array with these logical axes lies on the mesh."""
    return NamedSharding(mesh, sharding.spec(axes))
