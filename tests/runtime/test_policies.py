"""Several policies in one engine: published under live sessions, pinned, frozen by name, trained meanwhile.

What a token's log-prob should be is computed here a second time: by one pass over the whole context, or, where keys
of several versions are mixed, by a model that takes one token at a time and knows which weights wrote each position.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trio
from conftest_runtime import LORA, MODEL, SmallPolicy, random_adapter

from jaxrl.algo.loss import make_loss
from jaxrl.algo.objective import Objective
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.models import forward
from jaxrl.models.lora import at_layer
from jaxrl.runtime.engine import Engine, open_engine
from jaxrl.runtime.learner import Learner, Packing
from jaxrl.runtime.schedule import EngineConfig
from jaxrl.runtime.session import Session
from jaxrl.runtime.weights import FROZEN, Policy, Weights, snapshot
from jaxrl.types import Datum

pytestmark = pytest.mark.slow

CONFIG = EngineConfig(
    slots=6,
    context=96,
    prompts=4,
    prompt_context=16,
    members=4,
    decode_steps=4,
    extend_lengths=(16,),
    row_buckets=(6,),
    position_buckets=(96,),
)
"""One bucket of everything: five programs."""


def serve(policy: SmallPolicy, config: EngineConfig = CONFIG, **options: Any) -> AbstractAsyncContextManager[Engine]:
    return open_engine(policy.model, policy.weights, config=config, lora_scale=policy.lora.scale, **options)


def versions(policy: SmallPolicy) -> list[Weights]:
    """Four policies of one base that disagree."""
    return [policy.weights, *[Weights(policy.weights.params, random_adapter(MODEL, LORA, s)) for s in (77, 78, 79)]]


@dataclass
class Played:
    """What an episode saw: every token; beside it the log-prob and version it was drawn with (nan, None: given)."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    kv_versions: tuple[tuple[int, int], ...] = ()

    @property
    def drawn(self) -> list[int]:
        return [i for i, version in enumerate(self.versions) if version is not None]


async def turns(session: Session, prompt: Sequence[int], count: int, budget: int) -> Played:
    """Turns of exactly `budget` draws; two tokens are given between them."""
    played, given = Played(), list(prompt)
    for turn in range(count):
        sample = await session.sample(given, max_tokens=budget)
        played.tokens += [*given, *sample.tokens]
        played.logprobs += [np.nan] * len(given) + list(sample.logprobs)
        played.versions += [None] * len(given) + list(sample.versions)
        given = [turn, turn + 1]
    played.kv_versions = session.kv_versions
    return played


async def play(engine: Engine, group: int | None, seed: int, policy: Policy | str | None = None) -> Played:
    prompt = np.random.default_rng(group or seed).integers(0, 300, 14).tolist()
    async with engine.session(group=group, seed=seed, policy=policy) as session:
        return await turns(session, prompt, 2, 9)


def worst(policy: SmallPolicy, played: Played, weights: Weights, indices: Sequence[int] | None = None) -> float:
    """Distance of recorded log-probs from one pass of `weights` over the whole episode."""
    where = np.array(played.drawn if indices is None else indices)
    return float(np.abs(policy.logprobs(weights, played.tokens)[where - 1] - np.array(played.logprobs)[where]).max())


@jax.jit
def one_token(weights: Weights, keys: Any, values: Any, token: Any, position: Any) -> tuple[Any, Any, Any]:
    """One token through the model over keys and values [L, S, K, C] of before; returns them grown, and log-probs."""
    grown: list[tuple[jax.Array, jax.Array]] = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        i = len(grown)
        k_SKC, v_SKC = keys[i].at[position].set(k[0, 0]), values[i].at[position].set(v[0, 0])
        grown.append((k_SKC, v_SKC))
        q_KGC = q[0, 0].reshape(MODEL.kv_heads, -1, MODEL.head_width)
        scores_KGS = jnp.einsum("kgc,skc->kgs", q_KGC, k_SKC) * MODEL.head_width**-0.5
        past_S = jnp.arange(keys.shape[1]) <= position
        shares_KGS = jax.nn.softmax(jnp.where(past_S, scores_KGS, -jnp.inf), axis=-1)
        return jnp.einsum("kgs,skc->kgc", shares_KGS, v_SKC).reshape(1, 1, -1)

    x = forward.embed(weights.params, token[None, None])
    for i, layer in enumerate(weights.params["layers"]):
        adapter, at = at_layer(weights.adapter, i), position[None, None]
        x = forward.block(x, layer, adapter, at, attend, config=MODEL, lora_scale=LORA.scale)
    logp_V = jax.nn.log_softmax(forward.logits(weights.params, x[0, 0], MODEL))
    return jnp.stack([k for k, _ in grown]), jnp.stack([v for _, v in grown]), logp_V


def mixed_logprobs(tokens: Sequence[int], weights_T: Sequence[Weights]) -> np.ndarray:
    """Log-probs of tokens[1:] where position t's keys are written, and token t + 1 is drawn, by weights_T[t]."""
    keys = values = jnp.zeros((MODEL.layers, 96, MODEL.kv_heads, MODEL.head_width))
    logprobs = []
    for t, weights in enumerate(weights_T):
        keys, values, logp_V = one_token(weights, keys, values, jnp.int32(tokens[t]), jnp.int32(t))
        logprobs.append(float(logp_V[tokens[t + 1]]))
    return np.array(logprobs)


def nothing_is_left(engine: Engine) -> bool:
    return (engine.live_sessions, engine.slots_in_use, engine.prompts_in_use) == (0, 0, 0)


# --- publishing under live sessions ------------------------------------------------------------------


async def three_publishes(policy: SmallPolicy, on_publish: Any) -> dict[str, Played]:
    """Episodes of which some live through three publishes, one is pinned, and one joins its group late."""
    config = EngineConfig(**{**vars(CONFIG), "on_publish": on_publish})
    results: dict[str, Played] = {}

    async def episode(name: str, group: int | None, seed: int, *, after: int = 0, **pinned: Any) -> None:
        while engine.version < after:
            await trio.lowlevel.checkpoint()
        prompt = np.random.default_rng(group or seed).integers(0, 300, 12).tolist()
        async with engine.session(group=group, seed=seed, **pinned) as session:
            results[name] = await turns(session, prompt, 3, 16)

    async def publisher() -> None:
        for version, weights in enumerate(versions(policy)[1:], 1):
            while engine.stats.decode_tokens < 60 * version:
                await trio.lowlevel.checkpoint()
            await engine.publish(weights, version=version)

    async with serve(policy, config) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(publisher)
            nursery.start_soon(episode, "first", 1, 11)
            nursery.start_soon(episode, "second", 1, 12)
            nursery.start_soon(episode, "alone", None, 13)
            nursery.start_soon(partial(episode, "late", 1, 14, after=1))
            nursery.start_soon(partial(episode, "pinned", 1, 15, policy=engine.policy))
        assert nothing_is_left(engine)
    return results


@pytest.fixture(scope="module")
def lives(policy: SmallPolicy) -> dict[str, dict[str, Played]]:
    """The episodes of `three_publishes` for each choice of `on_publish`."""
    return {choice: trio.run(three_publishes, policy, choice) for choice in ("recompute", "keep")}


def lived_through(played: Played) -> list[int]:
    """Versions in the order in which they drew; they never go back."""
    drew = [v for v in played.versions if v is not None]
    assert drew == sorted(drew)
    return sorted(set(drew))


def test_I15_recomputed_episodes_have_each_tokens_logprob_under_its_recorded_version(
    policy: SmallPolicy, lives: dict[str, dict[str, Played]]
) -> None:
    results, by_version = lives["recompute"], versions(policy)
    for name in ("first", "second", "alone"):
        assert lived_through(results[name]) == [0, 1, 2, 3]
    assert lived_through(results["late"])[0] >= 1
    for played in results.values():
        assert len(played.drawn) == 48
        for version in lived_through(played):
            indices = [i for i in played.drawn if played.versions[i] == version]
            assert worst(policy, played, by_version[version], indices) < 1e-5
            others = [w for v, w in enumerate(by_version) if v != version]
            assert min(worst(policy, played, w, indices) for w in others) > 1e-2, "the versions hardly differ"


def test_I15_kept_keys_give_each_tokens_logprob_over_the_versions_that_wrote_them(
    policy: SmallPolicy, lives: dict[str, dict[str, Played]]
) -> None:
    results, by_version = lives["keep"], versions(policy)
    for name in ("first", "second", "alone"):
        assert lived_through(results[name]) == [0, 1, 2, 3]
        assert [v for v, _ in results[name].kv_versions] == [0, 1, 2, 3]
    assert results["late"].kv_versions[0][0] >= 1, "a prompt of older weights was shared"
    for played in results.values():
        wrote_T = np.repeat([v for v, _ in played.kv_versions], np.diff([0, *[end for _, end in played.kv_versions]]))
        assert len(wrote_T) == len(played.tokens) - 1
        assert [wrote_T[i - 1] for i in played.drawn] == [played.versions[i] for i in played.drawn]
        expected = mixed_logprobs(played.tokens, [by_version[v] for v in wrote_T])
        drawn = np.array(played.drawn)
        np.testing.assert_allclose(np.array(played.logprobs)[drawn], expected[drawn - 1], atol=1e-4)
    newest = [i for i in results["first"].drawn if results["first"].versions[i] == 3]
    assert worst(policy, results["first"], by_version[3], newest) > 1e-3, "no older keys were mixed in"


def test_the_reference_for_mixed_keys_agrees_with_one_pass(policy: SmallPolicy) -> None:
    tokens = np.random.default_rng(0).integers(0, 300, 20).tolist()
    expected = policy.logprobs(policy.weights, tokens)
    np.testing.assert_allclose(mixed_logprobs(tokens, [policy.weights] * 19), expected, atol=1e-5)


@pytest.mark.parametrize("on_publish", ["recompute", "keep"])
def test_I15_a_pinned_session_keeps_its_weights_and_its_keys(
    policy: SmallPolicy, lives: dict[str, dict[str, Played]], on_publish: str
) -> None:
    pinned = lives[on_publish]["pinned"]
    assert set(lived_through(pinned)) == {0}
    assert {v for v, _ in pinned.kv_versions} == {0}
    assert worst(policy, pinned, policy.weights) < 1e-5


async def test_a_publish_makes_nobody_prefill_again_but_those_who_follow(policy: SmallPolicy) -> None:
    newer = versions(policy)[1]
    async with (
        serve(policy) as engine,
        engine.session(group=1, seed=1, policy=engine.policy) as pinned,
        engine.session(group=1, seed=2) as follows,
    ):
        assert (pinned.policy, follows.policy) == (engine.policy, None)
        for session in (pinned, follows):
            await session.sample(range(12), max_tokens=5)
        await engine.publish(newer, version=1)
        # Who follows has its context written again, of which the prompt store takes as much as it can.
        for session, again in ((pinned, 0), (follows, CONFIG.prompt_context)):
            before = engine.stats.copy()
            await session.sample([1, 2], max_tokens=5)
            assert (engine.stats - before).prefill_tokens == 2 + again


# --- several policies at once ------------------------------------------------------------------------


async def test_I7_I11_I15_policies_that_share_ticks_draw_what_each_draws_alone(policy: SmallPolicy) -> None:
    live, past, rival, older = versions(policy)
    pinned = Policy(older, version=-7)
    cases: list[tuple[int | None, Policy | str | None, Weights, int]] = [
        (1, None, live, 0),
        (1, "rival", rival, FROZEN),
        (1, "past", past, FROZEN),
        (1, pinned, older, -7),
        (None, "past", past, FROZEN),
        (None, None, live, 0),
        (1, "past", past, FROZEN),
    ]
    async with serve(policy) as engine:
        for group in (1, None):
            await play(engine, group, 1)
        compiled = engine.compilations
        engine.add_policy("past", past.adapter)
        engine.add_policy("rival", jax.tree.map(np.asarray, rival.adapter))  # as a checkpoint would be read
        alone = [await play(engine, group, s, chosen) for s, (group, chosen, *_) in enumerate(cases, 20)]
        together: dict[int, Played] = {}

        async def one(seed: int, group: int | None, chosen: Policy | str | None) -> None:
            together[seed] = await play(engine, group, seed, chosen)

        async with trio.open_nursery() as nursery:
            for seed, (group, chosen, *_) in enumerate(cases, 20):
                nursery.start_soon(one, seed, group, chosen)
        assert engine.compilations == compiled, "weights are arguments: another policy is no other program"
        assert nothing_is_left(engine)
    for (seed, played), by_itself, (_, _, weights, version) in zip(sorted(together.items()), alone, cases, strict=True):
        assert played.tokens == by_itself.tokens, f"the episode of seed {seed} depends on its company"
        assert {played.versions[i] for i in played.drawn} == {version}
        assert worst(policy, played, weights) < 1e-5


async def test_prompts_are_shared_within_a_policy_and_never_across(policy: SmallPolicy) -> None:
    async with serve(policy) as engine:
        engine.add_policy("past", versions(policy)[1].adapter)
        async with trio.open_nursery() as nursery:
            for seed, chosen in enumerate([None, "past", engine.policy, "past"]):
                nursery.start_soon(play, engine, 1, seed, chosen)
            while engine.stats.decode_tokens == 0:
                await trio.lowlevel.checkpoint()
            assert engine.prompts_in_use == 2
        # 13 tokens of the prompt once a policy; its last one and two observation tokens for each of four episodes.
        assert engine.stats.prefill_tokens == 2 * 13 + 4 * 3


async def test_one_policy_takes_one_call_a_chunk_and_two_take_two(policy: SmallPolicy, monkeypatch: Any) -> None:
    async def calls(engine: Engine, chosen: Sequence[Policy | str | None]) -> int:
        count, decode = 0, engine._programs.decode

        def counted(*args: Any) -> Any:
            nonlocal count
            count += 1
            return decode(*args)

        async def one(seed: int, policy: Policy | str | None) -> None:
            async with engine.session(seed=seed, policy=policy) as session:
                await session.sample([1, 2, 3], max_tokens=16)

        with monkeypatch.context() as patched:
            patched.setattr(engine._programs, "decode", counted)
            async with trio.open_nursery() as nursery:
                for seed, policy in enumerate(chosen):
                    nursery.start_soon(one, seed, policy)
        return count

    async with serve(policy) as engine:
        engine.add_policy("past", versions(policy)[1].adapter)
        assert await calls(engine, [None, None, None]) == 16 / CONFIG.decode_steps
        assert await calls(engine, [None, engine.policy, None]) == 16 / CONFIG.decode_steps
        assert await calls(engine, [None, "past", "past"]) == 2 * 16 / CONFIG.decode_steps


async def test_I9_cancelled_sessions_of_any_policy_leave_nothing(policy: SmallPolicy) -> None:
    async with serve(policy) as engine:
        engine.add_policy("past", versions(policy)[1].adapter)
        for delay in (0.0, 0.003, 0.02):
            with trio.move_on_after(delay):
                async with trio.open_nursery() as nursery:
                    for seed, chosen in enumerate([None, "past", engine.policy, "past"] * 3):
                        nursery.start_soon(play, engine, seed % 2, seed, chosen)
                    nursery.start_soon(partial(engine.publish, policy.weights, version=1))
            assert nothing_is_left(engine)
        engine.remove_policy("past")
        assert worst(policy, await play(engine, 1, 3), policy.weights) < 1e-5


# --- names -------------------------------------------------------------------------------------------


async def test_names_that_are_unknown_taken_or_in_use_are_refused(policy: SmallPolicy) -> None:
    adapter = versions(policy)[1].adapter
    async with serve(policy) as engine:
        with pytest.raises(ValueError, match=r"no policy 'past' is registered; none is; add_policy\(name, adapter\)"):
            async with engine.session(seed=1, policy="past"):
                pass
        engine.add_policy("step_10", adapter)
        engine.add_policy("rival", adapter)
        with pytest.raises(ValueError, match=r"no policy 'step_11' is registered; the nearest names are step_10$"):
            engine.remove_policy("step_11")
        with pytest.raises(ValueError, match=r"add_policy\('rival'\): there is one of that name; remove_policy it"):
            engine.add_policy("rival", adapter)
        async with engine.session(seed=1, policy="rival"):
            with pytest.raises(RuntimeError, match=r"remove_policy\('rival'\): .* sample from it: 1"):
                engine.remove_policy("rival")
        engine.remove_policy("rival")
        with pytest.raises(ValueError, match="no policy 'rival'"):
            engine.remove_policy("rival")
        with pytest.raises(ValueError, match=r"add_policy\('thin'\): adapter\.q_proj\.a is missing"):
            engine.add_policy("thin", {n: ab for n, ab in adapter.items() if n != "q_proj"})
        with pytest.raises(ValueError, match=r"session\(policy=version 4\): adapter\.\w+\.a is missing"):
            async with engine.session(seed=1, policy=Policy(Weights(policy.weights.params), 4)):
                pass
        assert nothing_is_left(engine)


# --- training meanwhile ------------------------------------------------------------------------------


def make_learner(policy: SmallPolicy) -> Learner:
    return Learner(
        MODEL,
        policy.weights.params,
        lora=LORA,
        objective=Objective(make_loss("importance_sampling"), "token_mean"),
        optimizer=OptimizerConfig(learning_rate=3e-2),
        packing=Packing((64,), rows=4),
    )


def datum() -> Datum:
    """Something to learn from."""
    tokens = np.random.default_rng(0).integers(0, 300, 40).astype(np.int32)
    mask = np.arange(40) >= 20
    signs = np.where(np.arange(40) % 2, 1.0, -1.0).astype(np.float32)
    logprobs, advantages = np.where(mask, np.float32(-5), np.float32(0)), np.where(mask, signs, np.float32(0))
    return Datum(tokens, mask, logprobs, advantages, np.where(mask, 0, -1).astype(np.int32), group=0, episode=0)


async def test_I15_sessions_sample_across_updates_that_donate_what_they_train(policy: SmallPolicy) -> None:
    learner, limiter = make_learner(policy), trio.CapacityLimiter(1)
    drawn_at: list[int] = []
    results: dict[str, Played] = {}
    weights = snapshot(learner.weights)

    async def trainer() -> None:
        while engine.stats.decode_tokens < 8:
            await trio.lowlevel.checkpoint()
        for version in (1, 2, 3):
            donated = learner.weights.adapter
            await trio.to_thread.run_sync(learner.update, [datum()], limiter=limiter)
            assert all(x.is_deleted() for x in jax.tree.leaves(donated))
            await engine.publish(learner.weights, version=version, copy=True)
            policies.append(engine.policy)
            drawn_at.append(engine.stats.decode_tokens)

    async def episode(name: str, seed: int, chosen: Policy | None) -> None:
        async with engine.session(group=1, seed=seed, policy=chosen) as session:
            results[name] = await turns(session, range(12), 2, 40)

    async with open_engine(MODEL, weights, config=CONFIG, lora_scale=LORA.scale, limiter=limiter) as engine:
        policies = [engine.policy]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer)
            nursery.start_soon(episode, "follows", 1, None)
            nursery.start_soon(episode, "pinned", 2, engine.policy)
        assert nothing_is_left(engine)
    assert 8 < drawn_at[0] < drawn_at[1] < drawn_at[2] < 160, "updates and ticks did not take turns"
    assert set(lived_through(results["pinned"])) == {0}
    assert worst(policy, results["pinned"], policies[0].weights) < 1e-5
    assert worst(policy, results["pinned"], policies[3].weights) > 1e-2, "the updates hardly changed the policy"
    follows = results["follows"]
    assert lived_through(follows) == [0, 1, 2, 3]
    for version, then in enumerate(policies):
        indices = [i for i in follows.drawn if follows.versions[i] == version]
        assert worst(policy, follows, then.weights, indices) < 1e-5


async def test_sampling_weights_that_were_donated_says_what_to_do(policy: SmallPolicy) -> None:
    weights = Weights(policy.weights.params, random_adapter(MODEL, LORA, 5))
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="copy=True"), flatten_subgroups=True):
        async with serve(policy) as engine, engine.session(seed=1) as session:
            await engine.publish(weights, version=1)
            await session.sample([1, 2], max_tokens=3)
            jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)(weights.adapter)
            await session.sample([1, 2], max_tokens=3)
