"""Games as they are played: what a seat hears, what a bad move leads to, and that both seats are treated alike."""

import pickle
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from envs.games import (
    CONNECT_FOUR,
    GAMES,
    KUHN_POKER,
    LOSS,
    NIM,
    TIC_TAC_TOE,
    Duel,
    DuelGroupBuilder,
    Match,
    Rules,
    SkipsUnplayed,
    TableGroupBuilder,
    begin,
    choose,
    conversing,
    demonstrate,
    duel,
    forfeit,
    measured,
    perfect_player,
    play,
    random_player,
    say,
    scripted,
    tasks,
    told,
)
from jaxrl.algo.baseline import moving_baseline
from jaxrl.algo.members import members
from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.env import Env, EnvGroupBuilder, MessageEnv
from jaxrl.runtime.episode import Limits
from jaxrl.runtime.message_env import EnvFromMessageEnv, TurnRules
from jaxrl.runtime.opponents import Frozen, Scripted
from jaxrl.runtime.rollout import RolloutPlan, run_group
from jaxrl.types import Message, Sample, StopReason, Task, Trajectory, Transition

BYTES = byte_tokenizer()
RENDERER = renderer_for(BYTES)
LIFT = partial(EnvFromMessageEnv, renderer=RENDERER, rules=TurnRules(failed_parse_reward=LOSS))
EVERY = pytest.mark.parametrize("rules", GAMES.values(), ids=lambda rules: rules.name)


def random_moves(rules: Rules[Any], seed: int) -> tuple[int, list[str]]:
    """A start, and the moves of a whole game."""
    rng = np.random.default_rng(seed)
    start = int(rng.integers(len(rules.starts)))
    match = begin(rules, start)
    while not match.over:
        match = play(match, choose(random_player(rules), match.state, rng))
    return start, [move for _, move in match.moves]


# --- matches --------------------------------------------------------------------------------------


def test_a_bad_move_is_answered_once_and_the_second_in_a_row_forfeits() -> None:
    match = begin(TIC_TAC_TOE, 0)
    match, complaint = say(match, "hm")
    assert complaint == "Say one move. Possible: 1 2 3 4 5 6 7 8 9"
    assert (match.over, match.to_move, match.moves) == (False, 0, ())
    again, complaint = say(match, "5")
    assert (complaint, again.moves, again.unread) == (None, ((0, "5"),), 0)
    lost, complaint = say(match, "still hm")
    assert (complaint, lost.rewards, lost.forfeited) == (None, (-1.0, 1.0), 0)
    assert measured(lost, 0) == {
        "success": 0.0, "win": 0.0, "draw": 0.0, "forfeit": 1.0, "first_seat": -1.0, "illegal_moves": 2.0, "moves": 0.0,
    }  # fmt: skip
    assert measured(lost, 1)["success"] == 1.0


def test_bad_moves_that_are_not_in_a_row_do_not_forfeit() -> None:
    match = begin(TIC_TAC_TOE, 0)
    for text in ("x", "1", "x", "4", "x", "2", "1", "5", "x", "3"):
        match, _ = say(match, text)
    assert match.rewards == (1.0, -1.0)
    assert match.illegal == (3, 2)


def test_the_opponents_bad_move_is_not_ones_own() -> None:
    match = begin(TIC_TAC_TOE, 0)
    for text in ("x", "1", "x", "x"):
        match, _ = say(match, text)
    assert match.rewards == (1.0, -1.0)
    assert forfeit(match, 0) == match, "what is over stays as it is"


@EVERY
@settings(max_examples=20)
@given(seed=st.integers(0, 999))
def test_rewards_sum_to_zero_and_lie_within_one(rules: Rules[Any], seed: int) -> None:
    start, moves = random_moves(rules, seed)
    match = begin(rules, start)
    for move in moves:
        assert match.rewards is None
        for seat in (0, 1):
            assert forfeit(match, seat).rewards == ((-1.0, 1.0) if seat == 0 else (1.0, -1.0))
        match = play(match, move)
    assert match.rewards is not None
    assert sum(match.rewards) == 0
    assert max(match.rewards) <= 1
    assert sum(measured(match, seat)["success"] for seat in (0, 1)) == 1


def test_what_a_seat_is_told() -> None:
    match = begin(TIC_TAC_TOE, 0)
    assert told(match, 0) == "Tic-tac-toe. You are X. Name a free cell.\n123\n456\n789"
    match, _ = say(match, "The secret plan is the centre: [5]")
    assert told(match, 1) == "Tic-tac-toe. You are O. Name a free cell.\nOpponent: 5\n123\n4X6\n789"
    match, _ = say(match, "1")
    assert told(match, 0) == "Opponent: 1\nO23\n4X6\n789"
    hand = begin(KUHN_POKER, 0)
    assert told(play(hand, "bet"), 1).endswith("\nOpponent: bet\nYour card: Q. Done: bet.")
    assert told(play(begin(CONNECT_FOUR, 0), "4"), 1).endswith("\n...X...\n1234567")


def test_a_start_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="start=6: kuhn_poker has 6 starts"):
        begin(KUHN_POKER, 6)


# --- episodes -------------------------------------------------------------------------------------

Speaker = Callable[[list[Message]], str | list[int]]
"""The conversation -> what to say, as text or as ids."""


@dataclass
class Episode:
    """How the episode of one member went, and what it heard."""

    stop: StopReason | None = None
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    masked: list[bool] = field(default_factory=list)
    messages: Sequence[Message] = ()

    @property
    def trajectory(self) -> Trajectory:
        assert self.stop is not None
        turn: Any = None
        return Trajectory((Transition((), turn, self.reward, True),), self.stop)


async def episode(env: Env, speaker: Speaker, limits: Limits, result: Episode) -> None:
    """One episode at token level, as a rollout plays it."""
    assert isinstance(env, SkipsUnplayed)
    seat = env.player
    assert isinstance(seat, MessageEnv)
    try:
        await env.initial_observation()
        turns = 0
        while result.stop is None:
            if limits.max_turns is not None and turns >= limits.max_turns:
                result.stop = StopReason.MAX_TURNS
                break
            said = speaker(list(seat.messages))
            step = await env.step(RENDERER.turn(Message("assistant", said)) if isinstance(said, str) else said)
            turns += 1
            result.reward += step.reward
            result.metrics |= step.metrics
            result.masked.append(step.masked)
            if step.episode_done:
                result.stop = step.stop_reason or StopReason.TERMINATED
        if result.stop in (StopReason.MAX_TURNS, StopReason.MAX_TOKENS):
            conclusion = await env.conclude(result.stop)
            assert conclusion is not None
            result.reward += conclusion.reward
            result.metrics |= conclusion.metrics
    finally:
        result.messages = tuple(seat.messages)
        with trio.CancelScope(shield=True):
            await env.close()


async def play_group(
    builder: EnvGroupBuilder, *speakers: Speaker, limits: Limits | None = None, delays: Sequence[float] = ()
) -> list[Episode]:
    """All members at once, with the group's rewards. delays: seconds before each begins."""
    envs, episodes = await builder.make_envs(), [Episode() for _ in speakers]

    async def one(member: int) -> None:
        await trio.sleep(delays[member] if delays else 0)
        await episode(envs[member], speakers[member], limits or Limits(8), episodes[member])

    async with trio.open_nursery() as nursery:
        for member in range(len(envs)):
            nursery.start_soon(one, member)
    trusted = [m for m, e in enumerate(episodes) if e.stop is not None]
    shared = await builder.compute_group_rewards([episodes[m].trajectory for m in trusted], [envs[m] for m in trusted])
    for m, (reward, metrics) in zip(trusted, shared, strict=True):
        episodes[m].reward += reward
        episodes[m].metrics |= metrics
    return episodes


def reads(moves: Sequence[str], seat: int = 0, *, around: str = "{}") -> Speaker:
    """Says its moves of a game in order."""
    return lambda messages: around.format(moves[seat::2][sum(m.role == "assistant" for m in messages)])


def table(rules: Rules[Any] = TIC_TAC_TOE, start: int = 0) -> TableGroupBuilder:
    return TableGroupBuilder(rules, start, LIFT)


@EVERY
def test_self_play_pays_both_seats_what_the_rules_say(rules: Rules[Any], autojump_clock: MockClock) -> None:
    async def main() -> None:
        for seed in range(8):
            start, moves = random_moves(rules, seed)
            first, second = await play_group(table(rules, start), reads(moves, 0), reads(moves, 1))
            match = begin(rules, start)
            for move in moves:
                match = play(match, move)
            assert (first.reward, second.reward) == match.rewards
            assert {first.stop, second.stop} == {StopReason.TERMINATED}
            assert first.metrics == measured(match, 0)

    trio.run(main, clock=autojump_clock)


@EVERY
@pytest.mark.parametrize("delays", [(0.0, 3.0), (3.0, 0.0)])
async def test_two_players_who_change_seats_change_rewards(
    rules: Rules[Any], delays: tuple[float, float], autojump_clock: MockClock
) -> None:
    """Anna and Bert play the same moves from either seat of mirrored starts; who of them is slow is of no account."""
    mirror = mirrored(rules)
    for seed in range(6):
        start, moves = random_moves(rules, seed)
        opener, answerer = reads(moves, 0), reads(moves, 1)
        here = await play_group(table(rules, start), opener, answerer, delays=delays)
        there = await play_group(table(mirror, start), answerer, opener, delays=delays)
        assert [e.reward for e in here] == [e.reward for e in reversed(there)] == [-e.reward for e in there]
        swapped = {**here[0].metrics, "first_seat": -here[0].metrics["first_seat"]}
        assert swapped == there[1].metrics


def mirrored(rules: Rules[Any]) -> Rules[Any]:
    """The same game with its seats exchanged."""

    def outcome(state: Any) -> tuple[float, float] | None:
        ended = rules.outcome(state)
        return ended and (ended[1], ended[0])

    return replace(
        rules,
        brief=lambda seat: rules.brief(1 - seat),
        to_move=lambda state: 1 - rules.to_move(state),
        outcome=outcome,
        render=lambda state, seat: rules.render(state, 1 - seat),
    )


def scripted_moves(moves: Sequence[str]) -> Any:
    """The other side reads its moves, whichever seat it has."""

    def reply(messages: Sequence[Message]) -> Message:
        seat = int("Opponent:" in messages[0].content)
        return Message("assistant", moves[seat::2][sum(m.role == "assistant" for m in messages)])

    return conversing(partial(Scripted, reply))


@EVERY
@settings(max_examples=10)
@given(seed=st.integers(0, 99))
def test_both_seats_hear_and_earn_in_a_duel_what_they_do_at_a_table(rules: Rules[Any], seed: int) -> None:
    start, moves = random_moves(rules, seed)

    async def main() -> None:
        at_table = await play_group(table(rules, start), reads(moves, 0), reads(moves, 1))
        for seat, seated in enumerate(at_table):
            if len(moves) <= seat:
                continue
            task = Task("duel", metadata={"start": start, "seat": seat, "seed": 0})
            builder = DuelGroupBuilder(task, rules, scripted_moves(moves), LIFT, 1)
            (alone,) = await play_group(builder, reads(moves, seat))
            assert (alone.reward, alone.metrics) == (seated.reward, seated.metrics)
            assert alone.messages == seated.messages

    trio.run(main)


async def test_the_opponent_hears_the_move_and_nothing_of_what_was_said_or_thought() -> None:
    moves = ["5", "1", "3", "7", "4", "6", "2", "8", "9"]
    loud = "<think>plot {0}</think>I hate losing, SECRET, so [{0}]"
    first, second = await play_group(table(), reads(moves, 0, around=loud), reads(moves, 1, around=loud))
    heard = [m.content for e in (first, second) for m in e.messages if m.role == "user"]
    assert len(heard) == 9
    assert not any(word in text for text in heard for word in ("SECRET", "hate", "plot", "think", "["))
    assert heard[1] == "Opponent: 1\nO23\n4X6\n789"
    task = Task("duel", metadata={"start": 0, "seat": 0, "seed": 0})
    said: list[Sequence[Message]] = []

    def reply(messages: Sequence[Message]) -> Message:
        said.append(messages)
        return Message("assistant", f"SECRET too: [{moves[2 * len(said) - 1]}]")

    builder = DuelGroupBuilder(task, TIC_TAC_TOE, conversing(partial(Scripted, reply)), LIFT, 1)
    (alone,) = await play_group(builder, reads(moves, 0, around=loud))
    assert not any("SECRET" in m.content for m in alone.messages if m.role == "user")
    assert not any("SECRET" in m.content for m in said[-1] if m.role == "user")
    assert [m.role for m in said[1]] == ["user", "assistant", "user"], "it sees its own part of the conversation"


# --- bad moves and early ends ---------------------------------------------------------------------


def garbage(messages: list[Message]) -> str:
    return "?"


CUT = RENDERER.turn(Message("assistant", "5"))[:-1]
"""A turn whose budget ran out."""


async def test_the_second_bad_move_in_a_row_gives_the_match_away_zero_sum() -> None:
    first, second = await play_group(table(), garbage, reads(["5"]))
    assert (first.reward, second.reward) == (-1.0, 1.0)
    assert [m.content for m in first.messages[1::2]] == ["?", "?"]
    assert first.messages[2].content.startswith("Say one move. Possible: 1 2")
    assert (first.metrics["forfeit"], second.metrics["forfeit"]) == (1.0, 0.0)


async def test_who_never_got_to_move_wins_but_is_not_trained_for_a_word_it_said() -> None:
    _, second = await play_group(table(), garbage, garbage)
    assert (second.stop, second.reward, second.masked) == (StopReason.TERMINATED, 1.0, [True])
    first, _ = await play_group(table(), reads(["5"]), garbage)
    assert (first.stop, first.reward, first.masked) == (StopReason.TERMINATED, 1.0, [False])


@pytest.mark.parametrize("turns", [0, 1])
async def test_a_turn_cut_by_its_budget_gives_the_match_away(turns: int) -> None:
    moves = ["5", "1", "9"]

    def cut(messages: list[Message]) -> str | list[int]:
        done = sum(m.role == "assistant" for m in messages)
        return moves[0::2][done] if done < turns else list(CUT)

    first, second = await play_group(table(), cut, reads(moves, 1))
    assert (first.stop, first.reward) == (StopReason.MAX_TOKENS, -1.0)
    assert (second.stop, second.reward) == (StopReason.TERMINATED, 1.0)
    assert first.metrics["forfeit"] == 1.0


async def test_running_out_of_turns_gives_the_match_away() -> None:
    first, second = await play_group(
        table(), reads(["1", "2", "5", "4"]), reads(["1", "2", "5", "4"], 1), limits=Limits(8, 1)
    )
    assert (first.stop, first.reward, second.reward) == (StopReason.MAX_TURNS, -1.0, 1.0)


@pytest.mark.parametrize("seat", [0, 1])
@pytest.mark.parametrize("penalty", [-1.0, -0.1])
async def test_a_turn_with_broken_framing_is_the_other_seats_gain(seat: int, penalty: float) -> None:
    broken = [BYTES.special("<tool_call>"), ord("5"), BYTES.special("<|im_end|>")]
    lift = partial(EnvFromMessageEnv, renderer=RENDERER, rules=TurnRules(failed_parse_reward=penalty))
    speakers: list[Speaker] = [reads(["5", "1", "2"], 0), reads(["5", "1", "2"], 1)]
    speakers[seat] = lambda messages: broken
    episodes = await play_group(TableGroupBuilder(TIC_TAC_TOE, 0, lift), *speakers)
    assert episodes[seat].stop is StopReason.PARSE_FAILURE, "else this tests nothing"
    assert (episodes[seat].reward, episodes[1 - seat].reward) == (penalty, -penalty)
    assert episodes[1 - seat].metrics["success"] == 1.0
    assert episodes[1 - seat].masked[-1] == (seat == 0), "the second seat had nothing to play"


async def test_a_seat_that_fails_leaves_the_other_without_a_result(autojump_clock: MockClock) -> None:
    def hangs(messages: list[Message]) -> str:
        raise trio.TooSlowError

    with pytest.RaisesGroup(trio.TooSlowError):
        await play_group(table(), reads(["5", "1"]), hangs)
    builder = table()
    envs = await builder.make_envs()
    result = Episode()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(episode, envs[0], reads(["5", "1"]), Limits(8), result)
        await envs[1].initial_observation()
        assert await envs[1].conclude(StopReason.TIMEOUT) is None, "the wall clock is nobody's fault"
        await envs[1].close()
    assert (result.stop, result.reward) == (StopReason.ENV, 0.0)
    assert await builder.compute_group_rewards([result.trajectory], envs[:1]) == [(0.0, {})]


async def test_an_opponent_that_cannot_play_forfeits_like_anybody(autojump_clock: MockClock) -> None:
    asked: list[str] = []

    def reply(messages: Sequence[Message]) -> Message:
        asked.append(messages[-1].content)
        return Message("assistant", "?")

    for seat, masked in ((0, False), (1, True)):
        task = Task("duel", metadata={"start": 0, "seat": seat, "seed": 0})
        builder = DuelGroupBuilder(task, TIC_TAC_TOE, conversing(partial(Scripted, reply)), LIFT, 1)
        for result in await play_group(builder, reads(["5"])):
            assert (result.stop, result.reward, result.masked) == (StopReason.TERMINATED, 1.0, [masked])
    assert asked[1].startswith("Say one move."), "told once"
    assert len(asked) == 4


# --- duels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seat", [0, 1])
async def test_I14_the_members_of_a_duel_face_the_same_opponent(seat: int) -> None:
    (task,) = tasks("train", 1, TIC_TAC_TOE, seats=(seat,), seed=3)
    builder = DuelGroupBuilder(task, TIC_TAC_TOE, scripted(random_player(TIC_TAC_TOE)), LIFT, 3, ("random",))

    def first_free(messages: list[Message]) -> str:
        board = messages[-1].content[-11:]
        return next(c for c in board if c.isdigit())

    a, b, c = await play_group(builder, first_free, first_free, first_free)
    assert a.messages == b.messages == c.messages
    assert a.reward == b.reward == c.reward
    assert builder.logging_tags() == ("random",)
    other = DuelGroupBuilder(
        Task(task.prompt, metadata={**task.metadata, "seed": 8}),
        TIC_TAC_TOE,
        scripted(random_player(TIC_TAC_TOE)),
        LIFT,
        1,
    )
    (d,) = await play_group(other, first_free)
    assert d.messages != a.messages


async def test_nobody_beats_the_perfect_player_in_a_duel() -> None:
    for task in tasks("test", 20, TIC_TAC_TOE):
        rng = np.random.default_rng(task.metadata["seed"])
        env = duel(TIC_TAC_TOE, scripted(perfect_player(TIC_TAC_TOE)))(task)
        messages = await env.reset(task)
        while True:
            free = [c for c in messages[-1].content[-11:] if c.isdigit()]
            result = await env.step(Message("assistant", str(rng.choice(free))))
            messages = result.messages
            if result.terminated:
                break
        assert result.reward <= 0
        assert env.match.rewards is not None


async def test_a_duel_is_one_episode_of_a_seat_that_there_is() -> None:
    (task,) = tasks("train", 1, TIC_TAC_TOE, seats=(0,))
    env = Duel(TIC_TAC_TOE, scripted(random_player(TIC_TAC_TOE))(task))
    with pytest.raises(RuntimeError, match="call reset first"):
        await env.step(Message("assistant", "5"))
    await env.reset(task)
    with pytest.raises(RuntimeError, match="already started"):
        await env.reset(task)
    env = Duel(TIC_TAC_TOE, scripted(random_player(TIC_TAC_TOE))(task))
    with pytest.raises(ValueError, match="seat is 2: expected 0 or 1"):
        await env.reset(Task("x", metadata={"start": 0, "seat": 2, "seed": 0}))


@pytest.mark.parametrize("seat", [0, 1])
async def test_an_end_is_paid_once_also_of_a_match_that_was_not_played(seat: int) -> None:
    (task,) = tasks("train", 1, TIC_TAC_TOE, seats=(seat,))
    env = duel(TIC_TAC_TOE, conversing(partial(Scripted, silent)))(task)
    await env.reset(task)
    assert (env.unplayed is None) == (seat == 0)
    assert (await env.step(Message("assistant", "5"))).reward == 1.0
    with pytest.raises(RuntimeError, match="after the match's end"):
        await env.step(Message("assistant", "5"))
    (lifted,) = await DuelGroupBuilder(task, TIC_TAC_TOE, conversing(partial(Scripted, silent)), LIFT, 1).make_envs()
    await lifted.initial_observation()
    word = RENDERER.turn(Message("assistant", "5"))
    assert (await lifted.step(word)).reward == 1.0
    with pytest.raises(RuntimeError, match="one episode"):
        await lifted.step(word)


async def test_at_a_table_an_end_is_paid_once() -> None:
    async def forfeits_or_waits(env: Env) -> None:
        assert isinstance(env, SkipsUnplayed)
        assert isinstance(env.player, MessageEnv)
        await env.initial_observation()
        while not (await env.step(RENDERER.turn(Message("assistant", "x")))).episode_done:
            pass
        with pytest.raises(RuntimeError, match="one episode"):
            await env.step(RENDERER.turn(Message("assistant", "x")))
        with pytest.raises(RuntimeError, match="after the match's end"):
            await env.player.step(Message("assistant", "x"))

    async with trio.open_nursery() as nursery:
        for env in await table(TIC_TAC_TOE).make_envs():
            nursery.start_soon(forfeits_or_waits, env)


async def test_I9_an_opponent_is_closed_with_its_env() -> None:
    closed: list[bool] = []

    class Host:
        async def reply(self, messages: Sequence[Message]) -> Message:
            return Message("assistant", "5")

        async def close(self) -> None:
            closed.append(True)

    (task,) = tasks("train", 1, TIC_TAC_TOE, seats=(1,))
    builder = DuelGroupBuilder(task, TIC_TAC_TOE, conversing(Host), LIFT, 2)
    for env in await builder.make_envs():
        await env.close()
    assert closed == [True, True]


def silent(messages: Sequence[Message]) -> Message:
    """An opponent's reply, at module level so that it can be pickled."""
    return Message("assistant", "")


@EVERY
def test_builders_pickle(rules: Rules[Any]) -> None:
    (task,) = tasks("train", 1, rules)
    for builder in (
        table(rules),
        DuelGroupBuilder(task, rules, scripted(perfect_player(rules)), LIFT, 2),
        DuelGroupBuilder(task, rules, conversing(partial(Scripted, silent)), LIFT, 2),
    ):
        again = pickle.loads(pickle.dumps(builder))
        assert again.describe() == builder.describe()
        assert again.coupled == isinstance(builder, TableGroupBuilder)


# --- through a rollout ----------------------------------------------------------------------------


class Texts:
    """A session that says what a function of the context's text says."""

    def __init__(self, speaker: Callable[[str], str], capacity: int) -> None:
        self._speaker, self._tokens, self.capacity = speaker, list[int](), capacity

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    async def sample(self, new_tokens: Sequence[int], *, max_tokens: int, **settings: Any) -> Sample:
        await trio.lowlevel.checkpoint()
        self._tokens += new_tokens
        said = RENDERER.turn(Message("assistant", self._speaker(BYTES.decode(self._tokens))))
        drawn = tuple(said[:max_tokens])
        self._tokens += drawn
        return Sample(drawn, (0.0,) * len(drawn), (0,) * len(drawn), "stop" if len(drawn) == len(said) else "length")

    def rewind(self, length: int) -> None:
        del self._tokens[length:]


@dataclass
class Speakers:
    """A sampler whose policies are functions of text, by name; None is the one in training."""

    speakers: dict[str | None, Callable[[str], str]]
    open: int = 0

    @asynccontextmanager
    async def session(self, *, group: Any = None, seed: int, policy: str | None = None) -> AsyncIterator[Texts]:
        self.open += 1
        yield Texts(self.speakers[policy], 400)
        self.open -= 1


def first_free_cell(context: str) -> str:
    return next(c for c in context[context.rindex("\n", 0, context.rindex("<|im_end|>")) - 7 :] if c in "123456789")


def second_free_cell(context: str) -> str:
    board = context[context.rindex("\n", 0, context.rindex("<|im_end|>")) - 7 :]
    return [c for c in board if c in "123456789"][:2][-1]


def plan(max_tokens: int = 4) -> RolloutPlan:
    return RolloutPlan((0, "train", 0), Limits(max_tokens, max_turns=10))


async def test_a_rollout_of_self_play_trains_both_seats_of_one_game() -> None:
    sampler = Speakers({None: first_free_cell})
    group = await run_group(sampler, table(), plan(), group=0)
    assert group.rewards_G == (1.0, -1.0), "1 2 3 4 5 6 7 in turn: X has 1 3 5 7"
    assert [len(t.transitions) for t in group.trajectories_G] == [4, 3]
    assert {t.stop_reason for t in group.trajectories_G} == {StopReason.TERMINATED}
    assert group.tags == ("tic_tac_toe",)
    assert sampler.open == 0
    advantages, after = moving_baseline([members(group)], {})
    assert [a.tolist() for a in advantages] == [[1.0, -1.0]]
    assert {name: round(value, 6) for name, value in after.items()} == {"tic_tac_toe#0": 0.05, "tic_tac_toe#1": -0.05}
    assert not any(turn.masked for t in group.trajectories_G for turn in t.transitions)


@pytest.mark.parametrize(
    ("say", "stops"),
    [
        (lambda context: "x", (StopReason.TERMINATED, StopReason.TERMINATED)),
        (lambda context: "well, " * 9, (StopReason.MAX_TOKENS, StopReason.TERMINATED)),
    ],
    ids=["unreadable", "too long"],
)
async def test_I13_a_rollout_of_a_game_that_was_given_away_is_zero_sum(say: Any, stops: Any) -> None:
    group = await run_group(Speakers({None: say}), table(), plan(), group=0)
    assert group.rewards_G == (-1.0, 1.0)
    assert tuple(t.stop_reason for t in group.trajectories_G) == stops
    assert [turn.masked for turn in group.trajectories_G[1].transitions] == [True]


async def test_a_past_policy_plays_the_other_seat_by_name() -> None:
    frozen = partial(Frozen, RENDERER, max_tokens=4, adapter="past")
    sampler = Speakers({None: first_free_cell, "past": second_free_cell})
    by_hand = ((0, "124", -1.0), (1, "1357", 1.0))  # the past takes 3 5 7; then 2 4 6 8, against 3 5 7
    for seat, moves, reward in by_hand:
        (task,) = tasks("train", 1, TIC_TAC_TOE, seats=(seat,))
        builder = DuelGroupBuilder(task, TIC_TAC_TOE, conversing(frozen), LIFT, 2, ("past",))
        group = await run_group(sampler, builder, plan(), group=0)
        assert group.rewards_G == (reward, reward)
        assert group.tags == ("past",)
        said = [BYTES.decode(turn.action.tokens)[:1] for turn in group.trajectories_G[0].transitions]
        assert "".join(said) == moves
        assert {t.stop_reason for t in group.trajectories_G} == {StopReason.TERMINATED}
    assert sampler.open == 0


# --- tasks and demonstrations ---------------------------------------------------------------------


def test_tasks_are_deterministic_and_balanced() -> None:
    made = tasks("train", 30, KUHN_POKER, seed=1)
    assert made == tasks("train", 30, KUHN_POKER, seed=1)
    assert made[:7] == tasks("train", 7, KUHN_POKER, seed=1)
    assert len({(t.metadata["start"], t.metadata["seat"]) for t in made[:12]}) == 12
    assert made != tasks("test", 30, KUHN_POKER, seed=1)
    assert {t.metadata["seat"] for t in tasks("test", 9, NIM, seats=(1,))} == {1}
    for change, teaches in (({"split": "val"}, "split is"), ({"count": -1}, "count is"), ({"seats": (2,)}, "seats is")):
        arguments: dict[str, Any] = {"split": "train", "count": 1, "rules": NIM, **change}
        with pytest.raises(ValueError, match=teaches):
            tasks(**arguments)


@EVERY
def test_a_demonstration_is_what_a_seat_says_and_hears(rules: Rules[Any]) -> None:
    strong = perfect_player(rules, lookahead=2 if rules is CONNECT_FOUR else None)
    for seat in (0, 1):
        shown = demonstrate(rules, (strong, random_player(rules)), seat, np.random.default_rng(seat))
        assert [m.role for m in shown] == ["user", "assistant"] * (len(shown) // 2)
        assert shown[0].content.startswith(rules.brief(seat))
        match = Match(rules, rules.starts[0])
        if rules is TIC_TAC_TOE:
            assert ("Opponent:" in shown[0].content) == bool(seat)
        assert all(m.content for m in shown)
        assert match.moves == ()
