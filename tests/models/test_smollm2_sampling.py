"""I3 on a real model: what the sampler recorded on SmolLM2 is what the trainer computes for the same tokens."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trio

from jaxrl.algo.batch import pack
from jaxrl.algo.step import make_eval_logprobs
from jaxrl.chat.families import renderer_for
from jaxrl.models import spec
from jaxrl.models.lora import LoraConfig, lora_specs
from jaxrl.runtime.engine import Engine, EngineConfig, Weights, open_engine
from jaxrl.runtime.policy import load_policy, policy_tokenizer
from jaxrl.types import Datum, Message, Sample

pytestmark = pytest.mark.full

LORA = LoraConfig(rank=4, alpha=8.0)
ENGINE = EngineConfig(
    slots=2,
    context=128,
    prompts=1,
    prompt_context=64,
    members=2,
    decode_steps=8,
    extend_lengths=(64,),
    position_buckets=(128,),
)


@pytest.fixture(scope="module")
def smollm2_gguf() -> str:
    root = os.environ.get("JAXRL_TEST_CACHE") or Path(__file__).resolve().parents[2] / ".cache"
    path = Path(root) / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.skip(f"no {path}: run `python tests/fetch_real.py` (make test-all does)")
    return str(path)


def test_I3_sampler_equals_trainer_on_smollm2(smollm2_gguf: str) -> None:
    model, params = load_policy(smollm2_gguf, dtype=jnp.float32)
    adapter = _some_adapter(lora_specs(model, LORA))
    renderer = renderer_for(policy_tokenizer(smollm2_gguf))
    question = renderer.open([Message("user", "Name a river.")])
    reply = renderer.extend([Message("user", "And one in Asia?")], after=())

    async def two_turns(engine: Engine, temperature: float) -> tuple[list[int], list[tuple[int, Sample]]]:
        async with engine.session(group=f"at {temperature}", seed=7) as session:
            drawn = []
            for given in (question, reply):
                start = len(session.tokens) + len(given)
                drawn.append((start, await session.sample(given, max_tokens=12, temperature=temperature)))
            return list(session.tokens), drawn

    async def sampled() -> dict[float, tuple[list[int], list[tuple[int, Sample]]]]:
        weights = Weights(params, adapter)
        async with open_engine(model, weights, config=ENGINE, lora_scale=LORA.scale) as engine:
            return {temperature: await two_turns(engine, temperature) for temperature in (1.0, 0.7)}

    for temperature, (tokens, drawn) in trio.run(sampled).items():
        datum = _datum(tokens, drawn)
        batch = pack([datum], [datum.mask.astype(np.float32)], width=128, rows=1)
        trained_NBT = make_eval_logprobs(model, LORA, temperature=temperature)(adapter, params, batch)
        worst = np.abs(np.where(batch.mask, trained_NBT - batch.logp_sampler, 0.0)).max()
        assert batch.mask.sum() == sum(len(sample.tokens) for _, sample in drawn) >= 2
        assert worst <= 1e-4


def _some_adapter(specs: dict) -> dict:
    """An adapter that changes something: B of a new one is zero."""
    fresh = spec.init(specs, jnp.dtype(jnp.float32), seed=1)
    return jax.tree.map(lambda x: x + 0.01 * jax.random.normal(jax.random.key(2), x.shape), fresh)


def _datum(tokens: list[int], drawn: list[tuple[int, Sample]]) -> Datum:
    n = len(tokens)
    mask, logprobs, versions = np.zeros(n, bool), np.zeros(n, np.float32), np.full(n, -1, np.int32)
    for start, sample in drawn:
        where = slice(start, start + len(sample.tokens))
        mask[where], logprobs[where], versions[where] = True, sample.logprobs, sample.versions
    return Datum(np.array(tokens, np.int32), mask, logprobs, mask.astype(np.float32), versions, 0, 0)
