"""Copies that outlive an update, and the check that what stands in for the live weights can run their programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest_runtime import LORA, MODEL, SmallPolicy, random_adapter
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.models.lora import LoraConfig
from jaxrl.models.sharding import make_mesh
from jaxrl.runtime.weights import Policy, Weights, check_alike, place_alike, snapshot


def donate(tree: Any) -> Any:
    """What an update does to the arrays it trains: new ones take their memory."""
    return jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(tree)


def fresh(seed: int = 5) -> Any:
    return random_adapter(MODEL, LORA, seed)


def test_a_snapshot_under_lora_shares_the_base_and_outlives_the_adapter(policy: SmallPolicy) -> None:
    live = Weights(policy.weights.params, fresh())
    before = jax.tree.map(np.array, live.adapter)
    copy = snapshot(live)
    donate(live.adapter)
    assert all(x.is_deleted() for x in jax.tree.leaves(live.adapter))
    assert copy.params is live.params
    jax.tree.map(np.testing.assert_array_equal, copy.adapter, before)


def test_a_snapshot_without_an_adapter_is_the_whole_model() -> None:
    live = Weights({"embed": jnp.arange(6.0), "layers": ({"q_proj": jnp.ones((2, 2))},)})
    copy = snapshot(live)
    donate(live.params)
    assert copy.adapter is None
    np.testing.assert_array_equal(copy.params["embed"], np.arange(6.0))
    np.testing.assert_array_equal(copy.params["layers"][0]["q_proj"], np.ones((2, 2)))


def test_a_snapshot_lies_where_the_weights_lie() -> None:
    where = NamedSharding(make_mesh(data=2, fsdp=2, tensor=2), PartitionSpec("fsdp", "tensor"))
    live = jax.device_put(jnp.ones((4, 4)), where)
    copy = snapshot(Weights({"embed": live})).params["embed"]
    assert copy.sharding == where
    donate(live)
    assert live.is_deleted()
    np.testing.assert_array_equal(copy, np.ones((4, 4)))


def test_weights_that_an_update_took_away_say_so(policy: SmallPolicy) -> None:
    gone = Policy(Weights(policy.weights.params, fresh()), version=3)
    assert gone.arrays() is gone.weights
    donate(gone.weights.adapter)
    with pytest.raises(RuntimeError, match=r"policy version 3 are gone.*snapshot\(weights\).*copy=True"):
        gone.arrays()


def without(adapter: Any, name: str) -> Any:
    return {n: ab for n, ab in adapter.items() if n != name}


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (without(fresh(), "q_proj"), r"here: adapter\.q_proj\.a is missing, .* have float32\[2, 64, 4\]"),
        (fresh() | {"x_proj": {"a": jnp.ones(2)}}, r"adapter\.x_proj\.a is float32\[2\], .* have no such array"),
        (random_adapter(MODEL, LoraConfig(rank=2, alpha=8.0), 5), r"is float32\[2, .*2\], but .* float32\[2, .*4\]"),
        (jax.tree.map(lambda x: x.astype(jnp.bfloat16), fresh()), r"is bfloat16\[.* but .* float32\["),
        (None, r"adapter\.\w+\.a is missing"),
    ],
)
def test_another_structure_shape_or_dtype_is_refused_by_name(policy: SmallPolicy, adapter: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place_alike(adapter, policy.weights, "here")
    with pytest.raises(ValueError, match=message):
        check_alike(Weights(policy.weights.params, adapter), policy.weights, "here")


def test_another_base_is_compared_too_and_an_equal_one_passes(policy: SmallPolicy) -> None:
    params, adapter = policy.weights
    check_alike(Weights(dict(params), fresh()), policy.weights, "here")
    with pytest.raises(ValueError, match=r"here: params\.embed is float32\[2\]"):
        check_alike(Weights(params | {"embed": jnp.ones(2)}, adapter), policy.weights, "here")
    with pytest.raises(ValueError, match="samples whole weights, without an adapter"):
        place_alike(adapter, Weights(params), "here")


def test_an_adapter_is_moved_to_where_the_live_one_lies_and_only_then() -> None:
    where = NamedSharding(make_mesh(data=8), PartitionSpec())
    alone, spread = {"a": jnp.ones((2, 3))}, {"a": jax.device_put(jnp.ones((2, 3)), where)}
    assert place_alike(alone, Weights({}, alone), "here")["a"] is alone["a"]
    assert place_alike(spread, Weights({}, spread), "here")["a"] is spread["a"]
    assert place_alike(alone, Weights({}, spread), "here")["a"].sharding == where
    for other in (np.ones((2, 3), np.float32), jax.device_put(jnp.ones((2, 3)), jax.devices()[3])):
        placed = place_alike({"a": other}, Weights({}, alone), "here")["a"]
        assert (placed.sharding, placed.committed) == (alone["a"].sharding, False)
