"""Sharding: one table, errors that name the parameter, and the same numbers on every mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algo_cases import CHUNK, TEMPERATURE, assert_trees_close, packed
from jax.sharding import PartitionSpec

from jaxrl.algo.loss import make_loss
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.algo.step import base_shardings, batch_shardings, init_state, make_train_step, state_shardings
from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import Adapter, LoraConfig
from jaxrl.models.sharding import RULES, make_mesh, shardings, spec
from jaxrl.types import Datum

pytestmark = pytest.mark.slow

OPTIMIZER = OptimizerConfig(1e-2, eps=1e-4)
MESHES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 1, 2)]


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(jnp.float32))


def test_the_table() -> None:
    mesh = make_mesh(2, 2, 2)
    tree = {"w": ("embed", "mlp"), "b": ("layers", None, "heads"), "x": ("batch", None, None)}
    shapes = {"w": shape(4, 6), "b": shape(3, 5, 2), "x": shape(8, 5, 7)}
    got = shardings(mesh, tree, shapes)
    assert got["w"].spec == PartitionSpec("fsdp", "tensor")
    assert got["b"].spec == PartitionSpec(None, None, "tensor")
    assert got["x"].spec == PartitionSpec(("data", "fsdp"), None, None)


def test_errors_name_the_parameter() -> None:
    mesh = make_mesh(2, 2, 2)
    one = lambda axes, *sizes: shardings(mesh, {"layers": ({"w": axes},)}, {"layers": ({"w": shape(*sizes)},)})  # noqa: E731
    with pytest.raises(ValueError, match=r"layers\.0\.w: no sharding rule for axis 'embd'; .* embed"):
        one(("embd", "mlp"), 4, 4)
    with pytest.raises(ValueError, match=r"layers\.0\.w: its axes 'heads' and 'mlp' both map to mesh axis 'tensor'"):
        one(("heads", "mlp"), 4, 4)
    with pytest.raises(ValueError, match=r"layers\.0\.w: axis 'embed' has 5 entries, .* fsdp cannot split into 2"):
        one(("embed", "mlp"), 5, 4)
    with pytest.raises(ValueError, match=r"needs 16 devices .* there are 8"):
        make_mesh(4, 2, 2)
    assert spec(("embed", None), RULES | {"embed": ()}) == PartitionSpec(None, None)


@pytest.fixture(scope="module")
def single(model: ModelConfig, lora: LoraConfig, base: Any, adapter: Adapter, data_D: list[Datum]) -> Any:
    return _two_steps(model, lora, base, adapter, data_D, None)


def _two_steps(model: ModelConfig, lora: LoraConfig | None, base: Any, params: Any, data: Any, mesh: Any) -> Any:
    """Metrics of two steps and the parameters after them, on the host. lora=None trains `params` whole."""
    kwargs = {"temperature": TEMPERATURE, "head_chunk": CHUNK, "mesh": mesh}
    step = make_train_step(model, lora, make_loss("ppo"), OPTIMIZER, **kwargs)
    batch, where = packed(data, rows=8), None
    if mesh is not None:
        where = state_shardings(model, lora, OPTIMIZER, mesh)
        base = None if lora is None else jax.device_put(base, base_shardings(model, mesh))
        batch = jax.device_put(batch, batch_shardings(mesh))
    state = init_state(OPTIMIZER, params, shardings=where)
    metrics = []
    for _ in range(2):
        state, m = step(state, base, batch)
        metrics.append(m)
    assert step._cache_size() == 1
    return jax.tree.map(np.asarray, (metrics, state.params))


@pytest.mark.parametrize("mesh", MESHES)
def test_I5_every_mesh_gives_the_single_device_update(
    mesh: tuple[int, int, int], single: Any, model: Any, lora: Any, base: Any, adapter: Any, data_D: list[Datum]
) -> None:
    metrics, params = _two_steps(model, lora, base, adapter, data_D, make_mesh(*mesh))
    assert_trees_close(metrics, single[0], 2e-5)
    assert_trees_close(params, single[1], 5e-5)  # Adam divides by the gradient's size, which enlarges rounding


def test_I5_full_fine_tuning_on_a_mesh(model: Any, base: Any, data_D: list[Datum]) -> None:
    want = _two_steps(model, None, None, base, data_D, None)
    got = _two_steps(model, None, None, base, data_D, make_mesh(2, 2, 2))
    assert_trees_close(got[0], want[0], 2e-5)
    assert_trees_close(got[1], want[1], 5e-5)


def test_parameters_and_moments_really_are_spread(model: Any, lora: Any, adapter: Adapter) -> None:
    where = state_shardings(model, lora, OPTIMIZER, make_mesh(1, 4, 2))
    state = init_state(OPTIMIZER, adapter, shardings=where)
    a = state.params["q_proj"]["a"]
    assert a.addressable_shards[0].data.shape == (2, 64 // 4, 4)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == a.shape and x.ndim == 3]
    assert moments
    assert all(m.sharding == a.sharding for m in moments if m.shape[1] == 64)
