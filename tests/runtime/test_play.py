"""A person in the place of the model: any env, as text; everything is closed once, however it ends."""

import asyncio
import math
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio
from episodes import BYTES, END, RENDERER, CountingBuilder, Echo, nap

from envs import guess_number, tool_use
from jaxrl.cli import main
from jaxrl.env import ActionExtra, Env, EnvGroupBuilder, MessageEnv, MessageStepResult, StepResult, StopCondition
from jaxrl.runtime.asyncio_bridge import asyncio_envs
from jaxrl.runtime.message_env import MessageEnvGroupBuilder
from jaxrl.runtime.play import group_at, play, play_dataset, turn_tokens
from jaxrl.types import Message, StopReason, Task, ToolCall, Trajectory
from recipes.guess_number import GuessNumber
from recipes.tictactoe_selfplay import Games
from recipes.tool_use import ToolUse

ROOT = Path(__file__).parents[2]


@dataclass
class Person:
    """Types these lines, one a turn, then leaves; keeps what was shown."""

    lines: Sequence[str]
    shown: list[str] = field(default_factory=list)
    typed: int = 0

    async def read(self, prompt: str) -> str:
        await trio.lowlevel.checkpoint()
        if self.typed == len(self.lines):
            raise EOFError
        self.typed += 1
        return self.lines[self.typed - 1]

    async def play(self, builder: EnvGroupBuilder, **options: Any) -> Trajectory:
        return await play(builder, RENDERER, read=self.read, write=self.shown.append, **options)


def group(make: Callable[[Task], MessageEnv], size: int = 1) -> MessageEnvGroupBuilder:
    return MessageEnvGroupBuilder(Task("task"), make, RENDERER, size)


# --- the environments of this project --------------------------------------------------------------


async def test_a_game_of_guess_the_number() -> None:
    (task,) = guess_number.tasks("test", 1, high=15, turns=4)
    wrong = [n for n in range(1, 16) if n != task.target][:2]
    person = Person([str(wrong[0]), "no number", str(task.target)])
    builder = MessageEnvGroupBuilder(task, guess_number.make_env, RENDERER, 2)
    episode = await person.play(builder)
    assert (episode.stop_reason, episode.reward, len(episode.transitions)) == (StopReason.TERMINATED, 1.0, 3)
    assert person.shown[0] == "<|im_start|>user\nGuess 1-15. 4 tries.<|im_end|>\n<|im_start|>assistant\n"
    hint = "higher" if task.target > wrong[0] else "lower"
    assert person.shown[1] == f"\n<|im_start|>user\n{hint}<|im_end|>\n<|im_start|>assistant\n", "only what is new"
    assert person.shown[3:] == [
        "[reward 1, success 1, guesses 3, valid_guesses 0.667]",
        "[the end: terminated, reward 1 in 3 turns]",
    ]


async def test_I1_what_was_typed_is_in_the_context_id_for_id() -> None:
    person = Person(["a", "b", "c"])
    episode = await person.play(group(lambda task: Echo(turns=3)))
    for before, after in zip(episode.transitions, episode.transitions[1:], strict=False):
        held = (*before.observation, *before.action.tokens)
        assert after.observation[: len(held)] == held
    assert [BYTES.decode(t.action.tokens) for t in episode.transitions] == [f"{x}<|im_end|>" for x in "abc"]
    actions = [t.action for t in episode.transitions]
    assert all(math.isnan(x) for action in actions for x in action.logprobs), "nobody can train on it by accident"
    assert {v for action in actions for v in action.versions} == {-1}


@pytest.mark.parametrize("form", ["/call lookup {{{arguments}}}", '{{"name": "lookup", "arguments": {{{arguments}}}}}'])
async def test_tools_are_called_from_a_line(form: str) -> None:
    (task,) = tool_use.tasks("test", 1, levels=[1])
    line = form.format(arguments=f'"key": "{task.metadata["keys"][0]}"')
    person = Person(["/call lookup {oops", line, f"Answer: {task.target}"])
    episode = await person.play(MessageEnvGroupBuilder(task, tool_use.make_env, RENDERER, 1))
    assert episode.reward == pytest.approx(1.0)
    assert len(episode.transitions) == 2, "a call that cannot be read is not sent"
    assert person.shown[1].startswith("[not sent. Tool call not read")
    assert f"<tool_response>\n{task.target}\n</tool_response>" in person.shown[3]
    assert "reward 0.3" in person.shown[2]


# --- what a line becomes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "stop", "expected"),
    [
        ("hi", (END,), (*b"hi", END)),
        ("hi", (7, END), (*b"hi", 7)),
        ("hi", ("\n\n", "."), (*b"hi\n\n",)),
        ("hi", (), (*b"hi",)),
        ("<|im_end|>", (END,), (*b"<|im_end|>", END)),
    ],
)
def test_a_turn_ends_as_the_env_wants_it(said: str, stop: StopCondition, expected: tuple[int, ...]) -> None:
    assert turn_tokens(said, RENDERER, stop) == expected


def test_a_call_is_written_as_the_model_would_write_it() -> None:
    call = ToolCall("look", '{"key": "a"}')
    tokens = turn_tokens(call, RENDERER, RENDERER.stop)
    assert RENDERER.parse(tokens).message == Message("assistant", tool_calls=(call,))
    assert turn_tokens(call, RENDERER, ("\n",)) == (*tokens[:-1], 10)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["/call look"], Message("assistant", tool_calls=(ToolCall("look", "{}"),))),
        (["/callous"], Message("assistant", "/callous")),
        (['{"a": 1}'], Message("assistant", '{"a": 1}')),
        (["one\\", "two"], Message("assistant", "one\ntwo")),
        ([""], Message("assistant", "")),
    ],
)
async def test_what_an_env_hears(lines: list[str], message: Message) -> None:
    env = Echo(turns=1)
    await Person(lines).play(group(lambda task: env))
    assert env.heard == [message]


# --- token-level envs --------------------------------------------------------------------------------


async def test_an_env_without_stops_and_messages_is_played_too() -> None:
    log: list[str] = []
    person = Person(["x", "yz"])
    episode = await person.play(CountingBuilder(log), member=2)
    assert [t.observation for t in episode.transitions] == [(1, 2, 3), (1, 2, 3, *b"x", 8, 9)]
    assert episode.transitions[-1].action.stop == "length"
    assert episode.reward == 2.0
    assert person.shown[:2] == ["\u27e801\u27e9\u27e802\u27e9\u27e803\u27e9", "\u27e808\u27e9\t"], "controls are shown"
    steps = ["step 2", "step 2"]
    assert log == ["make_envs", "initial_observation 2", *steps, "close 2", "close 1", "close 0", "cleanup"]


class Forgetful(Env):
    """Its second observation keeps three ids of the first."""

    async def initial_observation(self) -> tuple[tuple[int, ...], StopCondition]:
        return tuple(b"abcdef"), (END,)

    async def step(self, action: Sequence[int], *, extra: ActionExtra | None = None) -> StepResult:
        return StepResult(0.0, False, tuple(b"abcXY"), (END,), logs={"note": "cut\x1b"}, rewrite="compacted")


@dataclass(frozen=True)
class One(EnvGroupBuilder):
    env: Env

    async def make_envs(self) -> Sequence[Env]:
        return [self.env]


async def test_a_rewritten_history_is_said_to_be_one() -> None:
    person = Person(["hi"])
    episode = await person.play(One(Forgetful()))
    assert person.shown[1] == "[note cut\u27e81B\u27e9]"
    assert person.shown[2] == "[history rewritten after 3 of 9 tokens: compacted]\nXY"
    assert episode.stop_reason is StopReason.CANCELLED


# --- I9: nothing outlives it --------------------------------------------------------------------------


@contextmanager
def everything_closed(log: list[str]) -> Iterator[None]:
    yield
    assert sorted(e for e in log if e.startswith("c")) == ["cleanup", "close 0", "close 1", "close 2"]
    assert log[-1] == "cleanup"


async def test_I9_leaving_at_the_end_of_input_closes_everything_once() -> None:
    log: list[str] = []
    with everything_closed(log):
        person = Person(["x"])
        episode = await person.play(CountingBuilder(log))
    assert (episode.stop_reason, len(episode.transitions)) == (StopReason.CANCELLED, 1)
    assert person.shown[-1] == "[the end: cancelled, reward 0 in 1 turn]"


def fail_at(place: str) -> Callable[[str, int], Awaitable[None] | None]:
    def act(where: str, member: int) -> None:
        if where == place:
            raise ConnectionError("gone")

    return act


async def test_I9_an_error_of_the_env_is_what_is_seen_with_the_turn() -> None:
    log: list[str] = []
    with everything_closed(log), pytest.raises(ConnectionError, match="gone") as caught:
        await Person(["x"]).play(CountingBuilder(log, act=fail_at("step")))
    assert caught.value.__notes__ == ["in turn 1 of Counting"]


async def test_I9_ctrl_c_closes_everything_once() -> None:
    log: list[str] = []

    async def read(prompt: str) -> str:
        raise KeyboardInterrupt

    with everything_closed(log), pytest.raises(KeyboardInterrupt):
        await play(CountingBuilder(log), RENDERER, read=read, write=lambda text: None)


async def test_I9_a_cancelled_player_closes_everything_once() -> None:
    log: list[str] = []
    act = lambda where, member: nap(0.01) if where in ("close", "cleanup") else None  # noqa: E731

    async def read(prompt: str) -> str:
        await trio.sleep_forever()
        raise AssertionError

    with everything_closed(log), trio.move_on_after(0):
        await play(CountingBuilder(log, act=act), RENDERER, read=read, write=lambda text: None)


async def test_I9_a_group_that_cannot_be_made_is_cleaned_up() -> None:
    log: list[str] = []
    with pytest.raises(ConnectionError):
        await Person([]).play(CountingBuilder(log, act=fail_at("make_envs")))
    assert log == ["make_envs", "cleanup"]


async def test_I9_a_close_that_hangs_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    act = lambda where, member: nap(1e9) if where == "close" and member == 1 else None  # noqa: E731
    log: list[str] = []
    with everything_closed(log), pytest.raises(TimeoutError, match="took more than 30 s"):
        await Person(["x", "y"]).play(CountingBuilder(log, act=act))


async def test_a_member_that_is_not_there() -> None:
    log: list[str] = []
    with everything_closed(log), pytest.raises(ValueError, match="member=3: the group has members 0 to 2"):
        await Person([]).play(CountingBuilder(log), member=3)


# --- datasets ----------------------------------------------------------------------------------------


async def test_a_place_in_a_split_is_played() -> None:
    person = Person([])
    builder = GuessNumber(batch_size=2, steps=2, test_games=3)
    await play_dataset(builder, RENDERER, split="train", index=3, read=person.read, write=person.shown.append)
    assert person.shown[0] == "[Guess 1-15. 7 tries.]\n"
    train, test = await builder(RENDERER)
    assert group_at(train, 3) == train.get_batch(1)[1]
    assert test is not None
    assert group_at(test, 2) == test.get_batch(0)[2]
    for index in (4, -1):
        with pytest.raises(ValueError, match=f"index={index}: expected 0 or more"):
            group_at(train, index)


async def test_seats_that_wait_for_each_other_are_no_game_for_one() -> None:
    with pytest.raises(ValueError, match="one person cannot be all of them: say split=test"):
        await play_dataset(Games(), RENDERER, split="train", read=Person([]).read)
    person = Person(["5"])
    assert (await play_dataset(Games(), RENDERER, read=person.read, write=person.shown.append)).transitions


class NeedsAsyncio(Echo):
    """Answers from a task of asyncio."""

    async def step(self, message: Message) -> MessageStepResult:
        return await asyncio.get_running_loop().create_task(super().step(message))


async def test_an_env_that_needs_asyncio_is_played() -> None:
    person = Person(["a", "b"])
    trajectory = await person.play(group(asyncio_envs(lambda task: NeedsAsyncio())))
    assert len(trajectory.transitions) == 2


async def test_a_split_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="split='dev': expected 'train' or 'test'"):
        await play_dataset(ToolUse(), RENDERER, split="dev")
    with pytest.raises(ValueError, match="no held-out data"):
        await play_dataset(ToolUse(test_tasks=0), RENDERER)


# --- the command -------------------------------------------------------------------------------------


@contextmanager
def piped(text: bytes) -> Iterator[None]:
    """Descriptor 0 gives this text and ends."""
    kept, (read, write) = os.dup(0), os.pipe()
    os.write(write, text)
    os.close(write)
    os.dup2(read, 0)
    try:
        yield
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(read)


def test_the_command_plays_what_is_piped_in(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("split=train", "index=1", "dataset_builder.high=3", "dataset_builder.turns=3")
    with piped(b"1\n2\n3"):
        assert main(["play", "recipes.guess_number", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "<|im_start|>user\nGuess 1-3. 3 tries.<|im_end|>" in out
    secret = guess_number.tasks("train", 2, high=3, turns=3)[1].target
    assert f"[reward 1, success 1, guesses {secret}, valid_guesses 1]" in out
    assert f"[the end: terminated, reward 1 in {secret} turn" in out


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_I9_a_signal_while_it_waits_for_a_line_ends_the_command(how: signal.Signals) -> None:
    command = (sys.executable, "-m", "jaxrl.cli", "play", "recipes.guess_number")
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as game:
        assert game.stdout is not None
        shown = ""
        while not shown.endswith("> "):
            shown += game.stdout.read(1)
        game.send_signal(how)
        _, complaint = game.communicate(timeout=60)
    assert game.returncode == 128 + how
    assert complaint == "\njaxrl play: interrupted\n"
