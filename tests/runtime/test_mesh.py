"""Sampling and training on a mesh of eight pretended devices, through the same engine and learner as on one."""

import jax
import numpy as np
import pytest
from conftest_runtime import LORA, MODEL, SmallPolicy

from jaxrl.algo.loss import make_loss
from jaxrl.algo.objective import Objective
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.algo.step import base_shardings
from jaxrl.models.sharding import make_mesh
from jaxrl.runtime.engine import open_engine
from jaxrl.runtime.learner import Learner, Packing
from jaxrl.runtime.schedule import EngineConfig
from jaxrl.types import Datum, Sample

pytestmark = pytest.mark.slow

ENGINE = EngineConfig(
    slots=2, context=64, prompts=0, prompt_context=1, decode_steps=4, extend_lengths=(32,), position_buckets=(64,)
)
"""Two programs in all: compiling for eight devices is slow."""


def learner(policy: SmallPolicy, mesh: jax.sharding.Mesh | None) -> Learner:
    base = policy.weights.params
    if mesh is not None:
        base = jax.device_put(base, base_shardings(MODEL, mesh))
    return Learner(
        MODEL,
        base,
        lora=LORA,
        objective=Objective(make_loss("importance_sampling"), "token_mean"),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        packing=Packing((64,), rows=4),
        mesh=mesh,
    )


async def one_step(trained: Learner) -> tuple[list[Sample], dict[str, float], Sample]:
    """Two turns of an episode, an update on the first, and a turn under the new weights."""
    async with open_engine(MODEL, trained.weights, config=ENGINE, lora_scale=LORA.scale) as engine:
        async with engine.session(seed=1) as session:
            turns = [await session.sample(list(range(20)), max_tokens=6), await session.sample([4, 5], max_tokens=6)]
            tokens = np.array(session.tokens, np.int32)
        mask = np.zeros(len(tokens), bool)
        mask[20:26], mask[28:34] = True, True
        logprobs = np.zeros(len(tokens), np.float32)
        logprobs[mask] = [x for turn in turns for x in turn.logprobs]
        datum = Datum(tokens, mask, logprobs, mask.astype(np.float32), np.where(mask, 0, -1).astype(np.int32), 0, 0)
        metrics = trained.update([datum])
        await engine.publish(trained.weights, version=1)
        async with engine.session(seed=2) as session:
            after = await session.sample([7, 8, 9], max_tokens=8)
    return turns, metrics, after


async def test_I5_I15_a_mesh_samples_learns_and_publishes_as_one_device_does(policy: SmallPolicy) -> None:
    alone = await one_step(learner(policy, None))
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    spread = learner(policy, mesh)
    assert len(spread.weights.params["layers"][0]["q_proj"].sharding.device_set) == 8
    together = await one_step(spread)
    for one, many in zip([*alone[0], alone[2]], [*together[0], together[2]], strict=True):
        assert one.tokens == many.tokens
        np.testing.assert_allclose(one.logprobs, many.logprobs, atol=2e-5)
    assert abs(together[1]["optim/kl_sample_train_v1"]) < 1e-5, "sampler and trainer disagree on the mesh"
    assert alone[1]["optim/grad_norm"] > 0
    np.testing.assert_allclose(alone[1]["optim/grad_norm"], together[1]["optim/grad_norm"], rtol=1e-4)
