"""The engine against one pass over whole sequences, and against everything that could make a token depend on luck."""

import itertools
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trio
from compiling import forget_programs
from conftest_runtime import SmallPolicy, random_adapter

from jaxrl.runtime.endpoint import open_endpoint
from jaxrl.runtime.engine import ContextFull, Engine, Weights, open_engine
from jaxrl.runtime.programs import Draw, Programs
from jaxrl.runtime.remote import RemoteSampler
from jaxrl.runtime.schedule import EngineConfig, Row
from jaxrl.runtime.weights import Policy

CONFIG = EngineConfig(
    slots=8,
    context=160,
    prompts=3,
    prompt_context=24,
    members=4,
    decode_steps=4,
    extend_lengths=(8, 32),
    row_buckets=(2,),
    position_buckets=(160,),
)
NARROW = replace(CONFIG, slots=2, prompts=0, extend_lengths=(8,), position_buckets=(64,))
"""Two slots and no prompts, but two lengths of a row that a program reads."""


def serve(policy: SmallPolicy, config: EngineConfig = CONFIG, **options: Any) -> AbstractAsyncContextManager[Engine]:
    return open_engine(policy.model, policy.weights, config=config, lora_scale=policy.lora.scale, **options)


@dataclass
class Played:
    """What an episode saw: every token, its log-prob (nan where given), and how many were given."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    given: int = 0


async def play(engine: Engine, group: int | None, seed: int, *, turns: int = 4, temperature: float = 1.0) -> Played:
    """An episode whose observations and budgets are a function of (group, seed) only."""
    rng = np.random.default_rng(seed)
    observation = np.random.default_rng(group or seed).integers(0, 300, 3 + seed % 37).tolist()
    if group is not None:
        observation = np.random.default_rng(group).integers(0, 300, 20 + group).tolist()
    played = Played()
    async with engine.session(group=group, seed=seed) as session:
        for _ in range(turns):
            budget = int(rng.integers(1, 14))
            turn = await session.sample(observation, stop=(7, 11), max_tokens=budget, temperature=temperature)
            played.tokens += [*observation, *turn.tokens]
            played.logprobs += [np.nan] * len(observation) + list(turn.logprobs)
            played.versions += [-1] * len(observation) + list(turn.versions)
            played.given += len(observation)
            observation = rng.integers(0, 300, int(rng.integers(1, 20))).tolist()
        assert session.tokens == played.tokens
    return played


async def play_all(engine: Engine, episodes: Sequence[tuple[int | None, int]], **options: Any) -> dict[int, Played]:
    results: dict[int, Played] = {}

    async def one(group: int | None, seed: int) -> None:
        results[seed] = await play(engine, group, seed, **options)

    async with trio.open_nursery() as nursery:
        for group, seed in episodes:
            nursery.start_soon(one, group, seed)
    return results


MIXED = [(g, 100 * g + m) for g in (1, 2, 3, 4, 5) for m in range(4)] + [(None, s) for s in range(6)]
"""More episodes than slots, more groups than kept prompts, some without a group."""


def worst(policy: SmallPolicy, played: Played, weights: Weights, temperature: float = 1.0) -> float:
    expected = policy.logprobs(weights, played.tokens, temperature)
    got = np.array(played.logprobs[1:])
    return float(np.nanmax(np.abs(got - expected)))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_I2_I3_extended_episodes_have_the_logprobs_of_one_pass(policy: SmallPolicy, temperature: float) -> None:
    async with serve(policy) as engine:
        results = await play_all(engine, MIXED, temperature=temperature)
    assert len(results) == len(MIXED)
    assert max(worst(policy, p, policy.weights, temperature) for p in results.values()) < 1e-5


async def test_I2_I3_however_far_a_program_reads_the_logprobs_are_those_of_one_pass(policy: SmallPolicy) -> None:
    async with serve(policy, NARROW) as engine:
        results = await play_all(engine, [(None, seed) for seed in range(5)], turns=6)
    lengths = sorted(len(p.tokens) for p in results.values())
    assert lengths[-1] > 64, "no row was longer than the first bucket"
    assert max(worst(policy, p, policy.weights) for p in results.values()) < 1e-5


async def test_I2_prefilled_tokens_are_exactly_prompts_and_observations(policy: SmallPolicy) -> None:
    async with serve(policy) as engine:
        results = await play_all(engine, [(None, seed) for seed in range(10)], turns=6)
        assert engine.stats.prefill_tokens == sum(p.given for p in results.values())
        drawn = sum(len(p.tokens) - p.given for p in results.values())
        assert engine.stats.decode_tokens == drawn


async def test_a_groups_prompt_is_prefilled_once(policy: SmallPolicy) -> None:
    async with serve(policy) as engine:
        results = await play_all(engine, [(4, seed) for seed in range(4)], turns=1)
        prompt = results[0].given
        # Shared: all but the last prompt token, which each member feeds to its own first draw.
        assert engine.stats.prefill_tokens == (prompt - 1) + len(results)
    assert len({tuple(p.tokens[:prompt]) for p in results.values()}) == 1
    assert len({tuple(p.tokens[prompt:]) for p in results.values()}) > 1, "members of a group drew the same tokens"


async def test_I7_tokens_do_not_depend_on_company_order_or_slots(policy: SmallPolicy) -> None:
    async with serve(policy) as engine:
        together = await play_all(engine, MIXED)
    async with serve(policy) as engine:
        backwards = await play_all(engine, MIXED[::-1])
    async with serve(policy) as engine:
        alone = {seed: await play(engine, group, seed) for group, seed in MIXED[::5]}
    for seed, played in alone.items():
        assert played.tokens == together[seed].tokens == backwards[seed].tokens


def spelled(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + i % 26) for i in ids)


async def test_I7_tokens_do_not_depend_on_how_many_are_drawn_in_a_call(policy: SmallPolicy) -> None:
    async def turns(decode_steps: int) -> list[tuple[int, ...]]:
        config = replace(NARROW, decode_steps=decode_steps)
        async with serve(policy, config, decode_text=spelled) as engine, engine.session(seed=1) as session:
            stopped = await session.sample([1, 2, 3], max_tokens=40, stop=("e",))
            assert stopped.stop == "stop"
            assert len(stopped.tokens) % 16, "no draw of the chunk was given back"
            after = await session.sample([5, 6], max_tokens=10)
            session.rewind(4)
            return [stopped.tokens, after.tokens, (await session.sample([7], max_tokens=10)).tokens]

    one_by_one = await turns(1)
    assert await turns(4) == one_by_one
    assert await turns(16) == one_by_one


async def test_I7_the_same_run_twice_is_the_same_to_the_bit(policy: SmallPolicy) -> None:
    async def run() -> dict[int, Played]:
        async with serve(policy) as engine:
            return await play_all(engine, MIXED)

    first, second = await run(), await run()
    for seed in first:
        np.testing.assert_array_equal(first[seed].logprobs, second[seed].logprobs)


@pytest.mark.parametrize("config", [CONFIG, NARROW], ids=["rows", "positions"])
async def test_I11_no_length_turn_count_or_batch_size_compiles_beyond_the_budget(
    config: EngineConfig, policy: SmallPolicy
) -> None:
    forget_programs()
    async with serve(policy, config) as engine:

        async def everything() -> None:
            await play_all(engine, MIXED)
            for count in (1, 3, 5):
                await play_all(engine, [(None, s) for s in range(count)], turns=1 + count)

        await everything()
        compiled = engine.compilations
        assert 0 < compiled <= engine.config.compile_budget
        await everything()
        assert engine.compilations == compiled, "a shape that was seen before compiled again"


async def test_turns_stop_at_token_ids_strings_budgets_and_the_context(policy: SmallPolicy) -> None:
    spell = lambda ids: "".join(chr(ord("a") + i % 3) for i in ids)  # noqa: E731
    async with serve(policy, decode_text=spell) as engine:
        async with engine.session(seed=1) as session:
            free = await session.sample([1, 2, 3], max_tokens=12)
            assert free.stop == "length"
            assert len(free.tokens) == 12
        async with engine.session(seed=1) as session:
            turn = await session.sample([1, 2, 3], stop=(free.tokens[4],), max_tokens=12)
            first = free.tokens.index(free.tokens[4])
            assert turn.tokens == free.tokens[: first + 1]
            assert turn.stop == "stop"
        text = spell(free.tokens)
        for stop in (text[2:5], text[5:8]):
            async with engine.session(seed=1) as session:
                turn = await session.sample([1, 2, 3], stop=(stop,), max_tokens=12)
                assert spell(turn.tokens) == text[: text.index(stop) + len(stop)]
                assert turn.logprobs == pytest.approx(free.logprobs[: len(turn.tokens)], abs=1e-6)
                again = await session.sample([5], max_tokens=3)
                expected = policy.logprobs(policy.weights, session.tokens)[-3:]
                np.testing.assert_allclose(again.logprobs, expected, atol=1e-5)
        async with engine.session(seed=1) as session:
            turn = await session.sample([1] * 150, max_tokens=500)
            assert len(turn.tokens) == 10
            assert session.room == 0
            with pytest.raises(ContextFull, match=r"1 new tokens after 160 .*engine\.context=160"):
                await session.sample([1], max_tokens=1)


async def test_greedy_takes_the_most_likely_token(policy: SmallPolicy) -> None:
    async with serve(policy) as engine, engine.session(seed=3) as session:
        turn = await session.sample([1, 2, 3], max_tokens=5, temperature=0.0)
    for i, token in enumerate(turn.tokens):
        context = [1, 2, 3, *turn.tokens[:i]]
        scores = [policy.logprobs(policy.weights, [*context, t])[-1] for t in (token, *range(0, 300, 37))]
        assert max(scores) == scores[0]
    assert turn.logprobs == (0.0,) * 5


async def test_I1_rewinding_keeps_a_common_prefix_and_stays_exact(policy: SmallPolicy) -> None:
    async with serve(policy) as engine, engine.session(group=3, seed=5) as session:
        prompt = list(range(20, 50))
        first = await session.sample(prompt, max_tokens=6)
        before = engine.stats.copy()
        for length in (33, 12, 0):  # into the history, into the shared prompt, everything
            session.rewind(length)
            kept = list(session.tokens)
            new = [8, 9, 10]
            turn = await session.sample(new, max_tokens=4)
            assert session.tokens == [*kept, *new, *turn.tokens]
            expected = policy.logprobs(policy.weights, session.tokens)[-4:]
            np.testing.assert_allclose(turn.logprobs, expected, atol=1e-5)
        assert (engine.stats - before).prefill_tokens <= 3 * 3 + 2
        assert len(first.tokens) == 6
        with pytest.raises(ValueError, match="rewind length=99: expected 0 to"):
            session.rewind(99)


async def test_I1_rewinding_into_the_shared_prompt_and_drawing_from_there_stays_exact(policy: SmallPolicy) -> None:
    async with serve(policy) as engine, engine.session(group=3, seed=5) as session:
        await session.sample(list(range(20, 50)), max_tokens=6)
        session.rewind(12)
        turn = await session.sample([], max_tokens=4)
        expected = policy.logprobs(policy.weights, session.tokens)[-4:]
        np.testing.assert_allclose(turn.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("on_publish", ["recompute", "keep"])
async def test_I15_new_weights_sample_and_old_keys_are_recomputed_or_tagged(
    policy: SmallPolicy, on_publish: Any
) -> None:
    config = EngineConfig(**{**vars(CONFIG), "on_publish": on_publish})
    newer = Weights(policy.weights.params, random_adapter(policy.model, policy.lora, 77))
    async with serve(policy, config) as engine, engine.session(group=1, seed=2) as session:
        first = await session.sample(list(range(30)), max_tokens=5)
        await engine.publish(newer, version=1)
        second = await session.sample([4, 5], max_tokens=5)
        assert set(first.versions) == {0}
        assert set(second.versions) == {1}
        expected = policy.logprobs(newer, session.tokens)[-5:]
        difference = np.abs(expected - second.logprobs).max()
        if on_publish == "recompute":
            assert difference < 1e-5
            assert {version for version, _ in session.kv_versions} == {1}
        else:
            assert difference > 1e-3
            assert [version for version, _ in session.kv_versions] == [0, 1]
        async with engine.session(group=1, seed=3) as fresh:  # a new member never reads the old prompt
            turn = await fresh.sample(list(range(30)), max_tokens=5)
            expected = policy.logprobs(newer, fresh.tokens)[-5:]
            np.testing.assert_allclose(turn.logprobs, expected, atol=1e-5)


async def test_I15_publishing_in_the_middle_of_a_turn_versions_each_token(policy: SmallPolicy) -> None:
    newer = Weights(policy.weights.params, random_adapter(policy.model, policy.lora, 77))
    async with serve(policy) as engine, engine.session(seed=2) as session, trio.open_nursery() as nursery:

        async def publish_later() -> None:
            while engine.stats.decode_tokens < 8:
                await trio.lowlevel.checkpoint()
            await engine.publish(newer, version=1)

        nursery.start_soon(publish_later)
        turn = await session.sample([1, 2, 3], max_tokens=60)
        old = turn.versions.count(0)
        assert list(turn.versions) == [0] * old + [1] * (60 - old)
        assert 8 <= old < 60
        expected_old = policy.logprobs(policy.weights, session.tokens)[2 : 2 + old]
        expected_new = policy.logprobs(newer, session.tokens)[2 + old :]
        np.testing.assert_allclose(turn.logprobs[:old], expected_old, atol=1e-5)
        np.testing.assert_allclose(turn.logprobs[old:], expected_new, atol=1e-5)


async def test_I9_cancelled_sessions_give_their_slots_back(policy: SmallPolicy) -> None:
    async with serve(policy) as engine:
        for delay in (0.0, 0.001, 0.02):
            with trio.move_on_after(delay):
                await play_all(engine, MIXED, turns=50)
        assert engine.live_sessions == 0
        assert engine.slots_in_use == 0
        results = await play_all(engine, MIXED)
        assert max(worst(policy, p, policy.weights) for p in results.values()) < 1e-5


async def test_I9_a_turn_given_up_leaves_a_session_that_can_go_on(policy: SmallPolicy) -> None:
    async with serve(policy) as engine, engine.session(seed=9) as session:
        await session.sample([1, 2, 3], max_tokens=2)
        with trio.move_on_after(0.003):
            await session.sample([4, 5], max_tokens=140)
        await session.sample([6], max_tokens=3)
        expected = policy.logprobs(policy.weights, session.tokens)[-3:]
        assert np.isfinite(expected).all()


async def test_I9_an_error_on_the_device_reaches_who_waits(policy: SmallPolicy, monkeypatch: Any) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the device is gone")

    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="the device is gone"), flatten_subgroups=True):
        async with serve(policy) as engine, engine.session(seed=1) as session:
            monkeypatch.setattr(engine._programs, "_decode", broken)
            await session.sample([1, 2], max_tokens=3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_policy_that_has_overflowed_ends_the_engine_by_its_name(
    policy: SmallPolicy, temperature: float
) -> None:
    overflown = jax.tree.map(lambda x: jnp.full_like(x, 1e20), policy.weights.adapter)
    message = "the logits of policy bad are not finite.*learning rate or the LoRA's alpha"
    with pytest.RaisesGroup(pytest.RaisesExc(FloatingPointError, match=message), flatten_subgroups=True):
        async with serve(policy) as engine:
            engine.add_policy("bad", overflown)
            async with engine.session(seed=1) as session:
                assert len((await session.sample([1, 2], max_tokens=3)).tokens) == 3
            async with engine.session(seed=1, policy="bad") as session:
                await session.sample([1, 2], max_tokens=3, temperature=temperature)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0: expected at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0: expected 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"stop": tuple(range(9))}, "9 stop ids: the engine takes at most 8"),
        ({"stop": ("x",)}, "need an engine opened with decode_text"),
        ({"new_tokens": []}, "new_tokens is empty in a new session"),
        ({"new_tokens": [1, 300]}, "new_tokens contains the id 300, and the model's vocabulary has the ids 0 to 299"),
        ({"new_tokens": [-1]}, "new_tokens contains the id -1"),
        ({"stop": (5, 2**40)}, "stop contains the id 1099511627776, and the model's vocabulary has the ids 0 to 299"),
        ({"stop": (-1,)}, "stop contains the id -1"),
    ],
)
async def test_bad_arguments_are_refused_also_from_elsewhere_and_the_session_goes_on(
    policy: SmallPolicy, arguments: dict[str, Any], message: str
) -> None:
    async with serve(policy) as engine, open_endpoint(engine) as endpoint:
        for sampler in (engine, RemoteSampler(endpoint.address)):
            async with sampler.session(seed=1) as session:
                with pytest.raises(ValueError, match=message):
                    await session.sample(**{"new_tokens": [1], "max_tokens": 3, **arguments})
                assert len((await session.sample([0, 299], max_tokens=3, stop=(299,))).tokens) > 0


def test_a_context_beyond_the_model_is_refused(policy: SmallPolicy) -> None:
    async def run() -> None:
        async with serve(policy, EngineConfig(context=1024)):
            pass

    with pytest.raises(ValueError, match=r"engine\.context=1024 exceeds the model's max_positions=512"):
        trio.run(run)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("extend_lengths", (32, 8)), ("extend_lengths", (0, 8)), ("row_buckets", (4, 4)), ("position_buckets", (-1,))],
)
def test_I12_buckets_are_sizes_in_ascending_order(name: str, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"engine\.{name}=.*expected (ascending sizes|at least 1)"):
        EngineConfig(**{name: sizes})
    with pytest.raises(ValueError, match="extend_lengths is empty"):
        EngineConfig(extend_lengths=())


def test_decoding_copies_no_cache(policy: SmallPolicy, fully_optimized: None) -> None:
    """Structural, for the whole-store program: temporary memory far below one copy of the store."""
    config = EngineConfig(slots=32, context=480, prompts=2, prompt_context=32, decode_steps=8)
    programs: Any = Programs(policy.model, config, policy.lora.scale, jnp.dtype(jnp.float32))
    seen: dict[str, Any] = {}

    class Seen(Exception):
        pass

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.update(args=args, kwargs=kwargs)
        raise Seen

    original, programs._decode = programs._decode, spy
    rows = [Row(slot, 470) for slot in range(32)]
    with pytest.raises(Seen):
        programs.decode(Policy(policy.weights, 0), rows, [Draw(1, 8, (0, slot), 0, 1.0, ()) for slot in range(32)])
    assert seen["kwargs"]["positions"] is None, "the rows are read where they lie"
    compiled = original.lower(*seen["args"], **seen["kwargs"]).compile()
    store = sum(x.nbytes for x in jax.tree.leaves(programs._main))
    assert compiled.memory_analysis().temp_size_in_bytes < store / 4


def test_seeds_of_any_64_bits_give_distinct_tokens(policy: SmallPolicy) -> None:
    async def run() -> list[tuple[int, ...]]:
        async with serve(policy) as engine:
            drawn = []
            for seed in (0, 1, 2**32, 2**32 + 1, 2**63 + 5):
                async with engine.session(seed=seed) as session:
                    drawn.append((await session.sample([1, 2, 3], max_tokens=10)).tokens)
            return drawn

    drawn = trio.run(run)
    assert all(a != b for a, b in itertools.combinations(drawn, 2))


async def test_I9_episodes_that_wait_for_an_opponent_here_do_not_keep_the_slot_it_needs(policy: SmallPolicy) -> None:
    """Two episodes hold both slots while they wait for a third session; it is served, and nobody notices."""

    async def duel(engine: Engine, seed: int) -> list[tuple[int, ...]]:
        said: list[tuple[int, ...]] = []
        async with engine.session(seed=seed) as mine, engine.session(seed=seed + 100) as theirs:
            for turn in range(3):
                for session in (mine, theirs):
                    drawn = await session.sample([1 + seed, 2 + turn], max_tokens=5)
                    said.append(drawn.tokens)
        return said

    with trio.fail_after(60):
        alone = {}
        for seed in (1, 2):
            async with serve(policy) as engine:
                alone[seed] = await duel(engine, seed)
        together: dict[int, Any] = {}
        async with serve(policy, NARROW) as engine, trio.open_nursery() as nursery:

            async def one(seed: int) -> None:
                together[seed] = await duel(engine, seed)

            for seed in (1, 2):
                nursery.start_soon(one, seed)
        assert together == alone
        assert engine.slots_in_use == 0


async def test_games_for_more_seats_than_slots_stall_a_few_times_and_not_at_every_move(
    policy: SmallPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen games of two seats on eight slots: first half the games that began go on, then one after another ends."""
    games, moves, stalls = 16, 6, []
    evict = Engine._evict
    monkeypatch.setattr(Engine, "_evict", lambda engine: (stalls.append(engine.slots_in_use), evict(engine))[1])

    async def game(engine: Engine, number: int) -> None:
        opened = [engine.session(group=number, seed=2 * number + seat) for seat in range(2)]
        async with opened[0] as first, opened[1] as second:
            for move in range(moves):
                await (first, second)[move % 2].sample([1 + number, 2 + move, 3, 4], max_tokens=2)

    with trio.fail_after(60):
        async with serve(policy, replace(CONFIG, prompts=0)) as engine:
            async with trio.open_nursery() as nursery:
                for number in range(games):
                    nursery.start_soon(game, engine, number)
            prefilled = engine.stats.prefill_tokens
    assert 1 <= len(stalls) <= 4
    assert set(stalls) == {CONFIG.slots}
    assert prefilled <= 1.25 * games * moves * 4
