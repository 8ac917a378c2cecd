"""Games of two and more: turns in order, one mover at a time, and nobody waits for a player who is gone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.env import Env, EnvGroupBuilder, MessageEnv, MessageStepResult
from jaxrl.runtime.message_env import EnvFromMessageEnv
from jaxrl.seats import GameOver, SeatLeft, Table, YourTurn
from jaxrl.types import Message, StopReason, Task

RENDERER = renderer_for(byte_tokenizer())


# --- a game: take one to three stones, who takes the last one wins -------------------------------


@dataclass
class Pile:
    """What the seats of one game share."""

    table: Table
    stones: int
    winner: int | None = None
    moves: list[tuple[int, int]] = field(default_factory=list)


class TakeAway(MessageEnv):
    """One seat at the pile."""

    def __init__(self, pile: Pile, seat: int) -> None:
        self._pile, self.seat = pile, seat
        self._messages: list[Message] = []
        self._ended: MessageStepResult | None = None

    async def reset(self, task: Task) -> Sequence[Message]:
        self._pile.table.sit(self.seat)
        result = await self._wait()
        self._ended = None if result.messages else result  # the game ended before this seat ever moved
        self._messages += result.messages or [Message("user", "game over")]
        return self.messages

    async def step(self, message: Message) -> MessageStepResult:
        if self._ended:
            return self._ended
        taken = int(message.content)
        self._pile.stones -= taken
        self._pile.moves.append((self.seat, taken))
        if self._pile.stones == 0:
            self._pile.winner = self.seat
            self._pile.table.end()
        else:
            self._pile.table.pass_to((self.seat + 1) % self._pile.table.seats)
        result = await self._wait()
        self._messages += [message, *result.messages]
        return result

    async def _wait(self) -> MessageStepResult:
        match await self._pile.table.turn(self.seat):
            case YourTurn():
                return MessageStepResult(messages=[Message("user", f"{self._pile.stones} stones")])
            case GameOver():
                return MessageStepResult(terminated=True, reward=float(self._pile.winner == self.seat))
            case SeatLeft(seat, sat):
                return MessageStepResult(truncated=True, metrics={"left": seat, "sat": sat})

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)

    async def close(self) -> None:
        self._pile.table.leave(self.seat)


@dataclass(frozen=True)
class TakeAwayBuilder(EnvGroupBuilder):
    """A group is a game, so every call makes a new table."""

    stones: int = 9
    seats: int = 2

    async def make_envs(self) -> Sequence[Env]:
        pile, task = Pile(Table(self.seats), self.stones), Task("take-away")
        return [EnvFromMessageEnv(TakeAway(pile, seat), task, RENDERER) for seat in range(self.seats)]


Player = Callable[[int], int]
"""Stones on the table -> stones to take. May raise."""


def perfect(stones: int) -> int:
    """Leaves a multiple of four."""
    return stones % 4 or 1


def timid(stones: int) -> int:
    """Takes one."""
    return 1


@dataclass
class Episode:
    """How the episode of one seat went."""

    stop: StopReason | None = None
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    error: Exception | None = None


async def play(env: Env, player: Player, episode: Episode, delays: Sequence[float] = (0.0,)) -> None:
    """One episode at token level, `delays` before its turns; whatever happens, the env is closed."""
    assert isinstance(env, EnvFromMessageEnv)
    try:
        await trio.sleep(delays[0])
        await env.initial_observation()
        for turn in range(100):
            await trio.sleep(delays[turn % len(delays)])
            said = env.message_env.messages[-1].content
            move = player(int(said.split()[0])) if said != "game over" else 0
            result = await env.step(RENDERER.turn(Message("assistant", str(move))))
            episode.reward += result.reward
            if result.episode_done:
                episode.stop, episode.metrics = result.stop_reason, dict(result.metrics)
                return
    except LookupError as error:
        episode.error = error
    finally:
        with trio.CancelScope(shield=True):
            await env.close()


async def game(
    builder: TakeAwayBuilder,
    *players: Player,
    delays: Sequence[Sequence[float]] = (),
    lives: Mapping[int, float] = MappingProxyType({}),
) -> tuple[list[Episode], Pile]:
    """All seats at once. lives: seats that are cancelled after so many seconds."""
    envs = await builder.make_envs()
    episodes = [Episode() for _ in envs]

    async def one(seat: int) -> None:
        with trio.move_on_after(lives.get(seat, float("inf"))):
            await play(envs[seat], players[seat], episodes[seat], delays[seat] if delays else (1.0,))

    async with trio.open_nursery() as nursery:
        for seat in range(len(envs)):
            nursery.start_soon(one, seat)
    assert isinstance(envs[0], EnvFromMessageEnv)
    assert isinstance(envs[0].message_env, TakeAway)
    return episodes, envs[0].message_env._pile


# --- games ---------------------------------------------------------------------------------------


async def test_a_game_is_played_to_its_end_in_turns(autojump_clock: MockClock) -> None:
    (first, second), pile = await game(TakeAwayBuilder(9), perfect, timid)
    assert pile.moves == [(0, 1), (1, 1), (0, 3), (1, 1), (0, 3)], "9-1-1-3-1-3: worked out by hand"
    assert (first.stop, first.reward) == (StopReason.TERMINATED, 1.0)
    assert (second.stop, second.reward) == (StopReason.TERMINATED, 0.0)


async def test_the_second_seat_wins_a_pile_of_eight(autojump_clock: MockClock) -> None:
    episodes, pile = await game(TakeAwayBuilder(8), timid, perfect)
    assert [e.reward for e in episodes] == [0.0, 1.0]
    assert pile.winner == 1


async def test_three_seats_take_their_turns(autojump_clock: MockClock) -> None:
    episodes, pile = await game(TakeAwayBuilder(5, seats=3), timid, timid, timid)
    assert [seat for seat, _ in pile.moves] == [0, 1, 2, 0, 1]
    assert [e.reward for e in episodes] == [0.0, 1.0, 0.0]
    assert {e.stop for e in episodes} == {StopReason.TERMINATED}


async def test_a_seat_that_never_got_to_move_sees_the_game_end(autojump_clock: MockClock) -> None:
    episodes, _ = await game(TakeAwayBuilder(1, seats=3), timid, timid, timid)
    assert [e.stop for e in episodes] == [StopReason.TERMINATED] * 3
    assert [e.reward for e in episodes] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("seats", [2, 3])
async def test_when_a_player_fails_the_others_are_told_who(seats: int, autojump_clock: MockClock) -> None:
    def fails(stones: int) -> int:
        if stones < 8:
            raise LookupError("no idea")
        return 1

    episodes, _ = await game(TakeAwayBuilder(9, seats=seats), timid, fails, *[timid] * (seats - 2))
    assert isinstance(episodes[1].error, LookupError)
    others = [episodes[0], *episodes[2:]]
    assert [(e.stop, e.metrics) for e in others] == [(StopReason.ENV, {"left": 1, "sat": True})] * (seats - 1)


async def test_when_a_player_is_cancelled_the_others_go_on_at_once(autojump_clock: MockClock) -> None:
    began = trio.current_time()
    delays = [(1.0,), (50.0,), (1.0,)]
    episodes, _ = await game(TakeAwayBuilder(9, seats=3), timid, timid, timid, delays=delays, lives={1: 60.0})
    assert trio.current_time() - began == pytest.approx(61.0), "at 60, and seat 2, told before its turn, takes 1 s"
    assert episodes[1].stop is None
    told = [(episodes[seat].stop, episodes[seat].metrics) for seat in (0, 2)]
    assert told == [(StopReason.ENV, {"left": 1, "sat": True})] * 2


async def test_the_player_whose_turn_it_is_learns_of_it_after_the_move(autojump_clock: MockClock) -> None:
    episodes, pile = await game(TakeAwayBuilder(9), timid, timid, delays=[(10.0,), (1.0,)], lives={1: 15.0})
    assert pile.moves == [(0, 1)]
    assert (episodes[0].stop, episodes[0].metrics) == (StopReason.ENV, {"left": 1, "sat": True})


async def test_a_seat_that_is_left_before_it_was_taken_is_told_apart(autojump_clock: MockClock) -> None:
    began = trio.current_time()
    episodes, _ = await game(TakeAwayBuilder(9), timid, timid, delays=[(1.0,), (99.0,)], lives={1: 5.0})
    assert trio.current_time() - began == pytest.approx(6.0), "at 5, and 1 s of its own turn"
    assert episodes[0].metrics == {"left": 1, "sat": False}


@given(
    stones=st.integers(1, 12),
    delays=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=2, max_size=3),
    moves=st.data(),
)
def test_however_the_players_interleave_everyone_hears_one_and_the_same_ending(
    stones: int, delays: list[list[int]], moves: st.DataObject
) -> None:
    seats = len(delays)
    doomed = moves.draw(st.integers(0, seats - 1))
    fails_at = moves.draw(st.none() | st.integers(0, stones))
    lives = {doomed: moves.draw(st.integers(0, 12))} if moves.draw(st.booleans()) else {}

    def mortal(left: int) -> int:
        if fails_at is not None and left <= fails_at:
            raise LookupError("gone")
        return 1

    players = [mortal if seat == doomed else timid for seat in range(seats)]

    async def main() -> tuple[list[Episode], Pile]:
        with trio.fail_after(10_000):  # virtual: nobody may wait for ever
            return await game(TakeAwayBuilder(stones, seats), *players, delays=delays, lives=lives)

    episodes, pile = trio.run(main, clock=MockClock(autojump_threshold=0))
    assert [seat for seat, _ in pile.moves] == [i % seats for i in range(len(pile.moves))], "in turn, one at a time"
    survivors = [e for seat, e in enumerate(episodes) if seat != doomed]
    assert [e.stop for e in survivors] == [survivors[0].stop] * (seats - 1)
    if pile.winner is None:
        assert [e.stop for e in survivors] == [StopReason.ENV] * (seats - 1)
        assert {e.metrics["left"] for e in survivors} == {doomed}
    else:
        assert pile.stones == 0
        assert [e.stop for e in survivors] == [StopReason.TERMINATED] * (seats - 1)
        assert sum(e.reward for e in episodes) <= 1.0


# --- the table -----------------------------------------------------------------------------------


async def test_the_game_waits_until_all_sit(autojump_clock: MockClock) -> None:
    table = Table(2)
    moved_at: list[float] = []

    async def first() -> None:
        table.sit(0)
        assert await table.turn(0) == YourTurn()
        moved_at.append(trio.current_time())

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first)
        await trio.sleep(30)
        table.sit(1)
    assert [t - began for t in moved_at] == [pytest.approx(30)]


async def test_a_seat_that_stays_free_counts_as_left_after_a_while(autojump_clock: MockClock) -> None:
    table = Table(3, seating_seconds=20)
    began = trio.current_time()
    table.sit(0)
    await trio.sleep(15)
    table.sit(2)
    told = []

    async def wait(seat: int) -> None:
        told.append(await table.turn(seat))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, 0)
        nursery.start_soon(wait, 2)
    assert told == [SeatLeft(1, sat=False)] * 2
    assert trio.current_time() - began == pytest.approx(20)
    table.sit(1)  # too late, and told so
    assert await table.turn(1) == SeatLeft(1, sat=False)


async def test_the_turn_waits_as_long_as_it_takes_once_all_sit(autojump_clock: MockClock) -> None:
    table = Table(2, seating_seconds=20)
    table.sit(0)
    table.sit(1)
    with trio.move_on_after(10_000) as scope:
        await table.turn(1)
    assert scope.cancelled_caught


async def test_the_first_ending_stays() -> None:
    table = Table(2)
    table.sit(0)
    table.sit(1)
    table.leave(1)
    table.leave(1)
    table.leave(0)
    table.end()
    table.pass_to(0)
    assert table.outcome == SeatLeft(1, sat=True)
    ended = Table(2)
    ended.sit(0)
    ended.sit(1)
    assert ended.outcome is None
    ended.end()
    ended.end()
    ended.leave(1)
    assert ended.outcome == await ended.turn(0) == GameOver()


async def test_a_turn_may_be_kept_and_the_first_mover_chosen() -> None:
    table = Table(2, first=1)
    table.sit(0)
    table.sit(1)
    assert await table.turn(1) == YourTurn()
    table.pass_to(1)
    assert await table.turn(1) == YourTurn()


async def test_a_granted_turn_is_a_checkpoint_too() -> None:
    table = Table(1)
    table.sit(0)
    with trio.CancelScope() as scope:
        scope.cancel()
        await table.turn(0)
    assert scope.cancelled_caught


async def test_misuse_is_explained() -> None:
    with pytest.raises(ValueError, match="seats=0: a table needs at least 1"):
        Table(0)
    with pytest.raises(ValueError, match="first=2: this table has seats 0 to 1"):
        Table(2, first=2)
    with pytest.raises(ValueError, match="seating_seconds=0: expected a positive"):
        Table(2, seating_seconds=0)
    table = Table(2)
    with pytest.raises(ValueError, match="seat=2: this table has seats 0 to 1"):
        table.sit(2)
    with pytest.raises(ValueError, match="seat=-1"):
        table.leave(-1)
    with pytest.raises(RuntimeError, match=r"turn\(0\) before sit\(0\)"):
        await table.turn(0)
    table.sit(0)
    with pytest.raises(RuntimeError, match=r"seat 0 was taken before.*make a fresh Table"):
        table.sit(0)
    table.leave(0)
    with pytest.raises(RuntimeError, match=r"turn\(0\) after leave\(0\)"):
        await table.turn(0)
    table = Table(2)
    table.end()
    with pytest.raises(RuntimeError, match=r"pass_to\(1\) after end\(\)"):
        table.pass_to(1)
