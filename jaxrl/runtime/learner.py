"""The training half of a run: state on the device, one update a batch, weights for the engine.

Owns the training state and the frozen base. Its methods block on the device and are called through the run's
limiter; nothing here is async, and nothing knows about environments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl.algo.aggregate import check_aggregation, token_weights
from jaxrl.algo.batch import choose_width, pack, padding_fraction
from jaxrl.algo.loss import make_loss
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.algo.step import TrainState, init_state, make_train_step, state_shardings
from jaxrl.models import spec
from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import LoraConfig, lora_specs
from jaxrl.models.spec import Params
from jaxrl.runtime.engine import Weights
from jaxrl.types import Datum


@dataclass(frozen=True)
class Objective:
    """What a step minimises: a per-token loss form with its knobs, and how tokens are weighted."""

    loss: str
    aggregation: str
    loss_config: Mapping[str, float] = field(default_factory=dict)
    aggregation_constant: float | None = None

    def __post_init__(self) -> None:
        make_loss(self.loss, self.loss_config)
        check_aggregation(self.aggregation, self.aggregation_constant)


@dataclass(frozen=True)
class Packing:
    """Shapes of a training batch. widths: positions of a row, ascending; a batch uses the least that fits.

    rows: rows of a micro-batch; each (number of micro-batches rounded up to a power of two, width) is a program.
    """

    widths: tuple[int, ...]
    rows: int = 8

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise ValueError(f"packing.widths={self.widths}: expected at least one width, each at least 1")
        if self.rows < 1:
            raise ValueError(f"packing.rows={self.rows}: expected at least 1")


@dataclass(frozen=True)
class MeshShape:
    """Devices along each axis: `data` and `fsdp` split the batch, `fsdp` and `tensor` the weights."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1


class Learner:
    """Owns the training state. `params` of the state is the adapter under LoRA, else the whole model."""

    def __init__(
        self,
        model: ModelConfig,
        base: Params,
        *,
        lora: LoraConfig | None,
        objective: Objective,
        optimizer: OptimizerConfig,
        packing: Packing,
        temperature: float = 1.0,
        remat: bool = True,
        mesh: Mesh | None = None,
        seed: int = 0,
    ) -> None:
        self.lora_scale = lora.scale if lora else 1.0
        self._objective, self._packing = objective, packing
        loss = make_loss(objective.loss, objective.loss_config)
        self._step = make_train_step(model, lora, loss, optimizer, temperature=temperature, remat=remat, mesh=mesh)
        if lora is None:
            self._base, start = None, base
        else:
            self._base, start = base, spec.init(lora_specs(model, lora), jnp.float32, seed=(seed, _ADAPTER_STREAM))
        where = None if mesh is None else state_shardings(model, lora, optimizer, mesh)
        self.state = init_state(optimizer, start, shardings=where)

    @property
    def weights(self) -> Weights:
        """What to sample from: the very arrays that are trained. Gone after the next update, which donates them."""
        return Weights(self.state.params) if self._base is None else Weights(self._base, self.state.params)

    @property
    def step(self) -> int:
        """Updates made so far."""
        return int(self.state.step)

    @property
    def compilations(self) -> int:
        """Training programs compiled so far."""
        return self._step._cache_size()  # pyright: ignore

    def update(self, data_D: Sequence[Datum]) -> dict[str, float]:
        """One optimizer step on a whole batch (none for an empty one). Raises FloatingPointError when it diverged."""
        if not data_D:
            return {"data/datums": 0.0}
        weights_D = token_weights(data_D, self._objective.aggregation, constant=self._objective.aggregation_constant)
        width = choose_width(data_D, self._packing.widths)
        batch = pack(data_D, weights_D, width=width, rows=self._packing.rows)
        self.state, metrics = self._step(self.state, self._base, batch)
        numbers = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if numbers.get("optim/nonfinite"):
            raise FloatingPointError(
                f"step {self.step}: loss or gradient is not finite; the parameters were left as they were. Lower the "
                "learning rate, or look at the rewards and log-probs of this step's rollouts"
            )
        return numbers | {"data/datums": float(len(data_D)), "data/padding_fraction": padding_fraction(batch)}

    def restore(self, state: TrainState) -> None:
        """Take over a state read from a checkpoint."""
        self.state = state

    def abstract_state(self) -> Any:
        """Shapes and dtypes of the state, for reading a checkpoint."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state)


_ADAPTER_STREAM = 0x10A  # keeps the adapter's key apart from other uses of the run's seed


def trained_tokens(data_D: Sequence[Datum]) -> int:
    """How many tokens get a gradient."""
    return int(sum(np.count_nonzero(d.mask) for d in data_D))
