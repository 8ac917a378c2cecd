"""Every environment in the tree keeps the contract; every check fails for an environment that does not keep its part.

ENVIRONMENTS has a row for each environment: how a group of it is made, and who plays it well.
"""

import asyncio
import functools
import importlib
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import trio
from chz.blueprint._entrypoint import EntrypointException
from sandboxes import missing

from envs import games, guess_number, preference, problems, search, terminal, text_arena, tool_use, twenty_questions
from envs.terminal.generate import write_tasks
from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.env import ActionExtra, Env, EnvGroupBuilder, MessageEnv, MessageStepResult, StepResult
from jaxrl.runtime.asyncio_bridge import asyncio_envs
from jaxrl.runtime.conformance import CHECKS, Nonconforming, Player, check_environment, main
from jaxrl.runtime.leftovers import held
from jaxrl.runtime.log import read_metrics
from jaxrl.runtime.message_env import EnvFromMessageEnv, MessageEnvGroupBuilder, TurnRules
from jaxrl.runtime.problem import ProblemGroupBuilder
from jaxrl.train import main as train
from jaxrl.train import parse
from jaxrl.types import Conclusion, Message, StopReason, Task, ToolCall

RENDERER = renderer_for(byte_tokenizer())
LIFT = partial(EnvFromMessageEnv, renderer=RENDERER, rules=TurnRules(failed_parse_reward=games.LOSS))


# --- every environment of the tree ----------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """An environment. make: a group. player: plays it well. settings: of the check."""

    make: Callable[[], EnvGroupBuilder]
    player: Player | None
    settings: dict[str, Any] = field(default_factory=dict)


def script(messages: Sequence[Message]) -> Player:
    """Says the turns of a demonstration, one after the other."""
    turns = [m for m in messages if m.role == "assistant"]
    return lambda context, turn: turns[min(turn, len(turns) - 1)]


def guess_row() -> Row:
    (task,) = guess_number.tasks("train", 1, high=15, turns=6, seed=3)
    shown = guess_number.demonstrate(task, guess_number.bisecting_player, np.random.default_rng(0))
    return Row(
        lambda: MessageEnvGroupBuilder(task, guess_number.make_env, RENDERER, 2), script(shown), {"ends_within": 6}
    )


def tool_row(level: int) -> Row:
    task = tool_use.pool("train", level)[-1]
    return Row(lambda: MessageEnvGroupBuilder(task, tool_use.make_env, RENDERER, 2), script(DEMONSTRATED[level]))


DEMONSTRATED = {level: tool_use.demonstrate(tool_use.pool("train", level)[-1]) for level in tool_use.LEVELS}


def questions_row() -> Row:
    (task,) = twenty_questions.tasks("train", 1, turns=8, seed=1)
    shown = twenty_questions.demonstrate(task, twenty_questions.splitting_player(), np.random.default_rng(0))
    return Row(
        lambda: MessageEnvGroupBuilder(task, twenty_questions.make_env, RENDERER, 2), script(shown), {"ends_within": 8}
    )


def problem_row(form: problems.Form) -> Row:
    (problem,) = problems.arithmetic("train", 1, form=form)
    said = problems.FORMS[form].write(problem.reference_answer)
    return Row(lambda: ProblemGroupBuilder(problem, RENDERER, 2), lambda context, turn: said, {"ends_within": 1})


MOVES: dict[str, Callable[[str], str]] = {
    "tic_tac_toe": lambda board: next(c for c in board if c in "123456789"),
    "connect_four": lambda board: next(str(i + 1) for i, c in enumerate(board.splitlines()[-7]) if c == "."),
    "nim": lambda board: next(f"{heap[0]}1" for heap in board.split() if heap[1] != "0"),
    "kuhn_poker": lambda board: "call" if board.rstrip().endswith("bet.") else "check",
}
"""A legal move from what a seat was shown last."""

SHOWN = {"tic_tac_toe": 3, "connect_four": 7, "nim": 1, "kuhn_poker": 1}
"""The lines of what a seat sees."""


def legal(game: str) -> Player:
    """Any legal move."""

    def play(context: str, turn: int) -> str:
        said = context.rpartition("<|im_end|>\n<|im_start|>assistant\n")[0]
        return MOVES[game]("\n".join(said.splitlines()[-SHOWN[game] :]))

    return play


def table_row(game: str) -> Row:
    return Row(lambda: games.TableGroupBuilder(games.GAMES[game], 0, LIFT), legal(game))


def duel_row(game: str, seat: int) -> Row:
    rules = games.GAMES[game]
    (task,) = games.tasks("train", 1, rules, seats=(seat,), seed=5)
    side = games.scripted(games.random_player(rules))
    return Row(lambda: games.DuelGroupBuilder(task, rules, side, LIFT, 2), legal(game))


def text_arena_row(seat: int | None) -> Row:
    pytest.importorskip("textarena", reason="needs textarena: pip install 'jaxrl[textarena]'")
    rules = text_arena.as_rules(text_arena.Game("TicTacToe-v0", starts=2), games.Rules, games.IllegalMove)
    if seat is None:
        return Row(lambda: games.TableGroupBuilder(rules, 1, LIFT), lowest_cell)
    (task,) = games.tasks("train", 1, rules, seats=(seat,))
    side = games.scripted(text_arena.random_player)
    return Row(lambda: games.DuelGroupBuilder(task, rules, side, LIFT, 2), lowest_cell)


def lowest_cell(context: str, turn: int) -> str:
    """The first number on the last board."""
    board = context.rpartition("Current Board:")[2].partition("Available")[0]
    return f"[{next(c for c in board if c.isdigit())}]"


def preference_row() -> Row:
    prompt = Task(preference.question("hot"))
    lift = partial(EnvFromMessageEnv, renderer=RENDERER, rules=TurnRules(failed_parse_reward=0.0))
    judge = preference.FunctionJudge(preference.Shorter())
    return Row(
        lambda: preference.PairwisePreferenceGroupBuilder(prompt, lift, 3, judge),
        lambda context, turn: "cold",
        {"ends_within": 1},
    )


@dataclass(frozen=True)
class Shelf:
    """A retriever with one passage."""

    async def prepare(self) -> None:
        await trio.lowlevel.checkpoint()

    async def search(self, queries: Sequence[str], k: int) -> list[list[search.Hit]]:
        await trio.lowlevel.checkpoint()
        return [[search.Hit(search.Passage("td", "Chad: Capital", "N'Djamena"), 1.0)] for _ in queries]


def search_row() -> Row:
    task = Task("Capital of Chad?", target=("N'Djamena",), metadata={"evidence": ("td",), "hops": 1})
    make = partial(search.make_env, retriever=Shelf())
    call = Message("assistant", tool_calls=(ToolCall("search", '{"query_list": ["Chad capital"]}'),))
    said = [call, Message("assistant", "Answer: N'Djamena")]
    return Row(lambda: MessageEnvGroupBuilder(task, make, RENDERER, 2), script(said))


@functools.cache
def own_tasks() -> tempfile.TemporaryDirectory[str]:
    """Removed when the tests end."""
    return tempfile.TemporaryDirectory(prefix="conformance-")


def terminal_row() -> Row:
    if why := missing():
        pytest.skip(why)
    (made,) = write_tasks(Path(own_tasks().name), names=["sort-numbers"])
    task = terminal.harbor_task(made)
    make = partial(terminal.make_env, options=terminal.TrialOptions(), max_turns=4)
    rules = TurnRules(max_unread_turns=3)
    calls = [Message("assistant", tool_calls=(ToolCall("bash", '{"command": "ls"}'),))] * 4
    settings = {"ends_within": 8, "cancellations": 2}
    return Row(lambda: MessageEnvGroupBuilder(task, make, RENDERER, 2, rules), script(calls), settings)


ENVIRONMENTS: dict[str, Callable[[], Row]] = {
    "guess_number": guess_row,
    **{f"tool_use, level {level}": partial(tool_row, level) for level in tool_use.LEVELS},
    "twenty_questions": questions_row,
    **{f"problems, {form}": partial(problem_row, form) for form in problems.FORMS},
    **{f"{game}, both seats": partial(table_row, game) for game in games.GAMES},
    **{f"{game}, seat {seat}": partial(duel_row, game, seat) for game in games.GAMES for seat in games.SEATS},
    "preference": preference_row,
    "search": search_row,
    "terminal": terminal_row,
    "text_arena, both seats": partial(text_arena_row, None),
    **{f"text_arena, seat {seat}": partial(text_arena_row, seat) for seat in games.SEATS},
}
"""One row each. Where a package of an extra is missing, the row's function calls pytest.importorskip."""


MARKS = [("terminal", "slow"), ("text_arena", "full")]
"""Of rows, by how their names start."""

ROWS = [
    pytest.param(row, id=name, marks=[getattr(pytest.mark, mark) for start, mark in MARKS if name.startswith(start)])
    for name, row in ENVIRONMENTS.items()
]


@pytest.mark.parametrize("row", ROWS)
async def test_every_environment_keeps_the_contract(row: Callable[[], Row]) -> None:
    environment = row()
    settings = {"cancellations": 6, **environment.settings}
    await check_environment(environment.make(), renderer=RENDERER, player=environment.player, **settings)


@pytest.mark.parametrize("game", games.GAMES)
async def test_the_player_of_a_game_knows_how_it_is_played(game: str) -> None:
    """Else a table row would show nothing but forfeits."""
    outcomes: list[str] = []
    player = legal(game)

    def watched(context: str, turn: int) -> Any:
        outcomes.append(context)
        return player(context, turn)

    await check_environment(
        table_row(game).make(), player=watched, without=[name for name in CHECKS if name != "repeats"]
    )
    assert outcomes
    assert not any("is not possible" in context or "Say one move" in context for context in outcomes)


# --- every check can fail -------------------------------------------------------------------------

LEAKED: list[int] = []
"""Descriptors that flawed envs left open, for the test to close."""

STARTED: list["subprocess.Popen[bytes]"] = []
"""Processes that flawed envs left running, for the test to end."""

RELEASED = threading.Event()
"""Ends the threads that flawed envs left running."""

SHARED: dict[str, Any] = {"starts": 0, "current": None}
"""What flawed envs share although they should not."""


@dataclass
class Told:
    """The inside of a good environment: say "end", or run out of five turns. Each flaw is a method's other body."""

    text: str = "Say end."
    turns: int = 0
    started: bool = False
    over: bool = False


def started(*command: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command)


class Flawed(Env):
    """A good environment, but for one flaw."""

    def __init__(self, flaw: str, member: int, group: object) -> None:
        self.flaw, self.member, self.group, self.state, self.context = flaw, member, group, Told(), ()

    async def initial_observation(self) -> Any:
        if self.state.started and self.flaw != "starts twice":
            raise RuntimeError("this env was started before; an env is one episode, so make another")
        self.state.started = True
        SHARED["starts"] += 1
        SHARED["current"] = self.group
        text = self.state.text
        if self.flaw == "another opening each time":
            text += str(SHARED["starts"])
        if self.flaw == "every member for itself":
            text += str(self.member)
        if self.flaw == "seeds the global generator":
            random.seed(0)
        await self.leave()
        self.context = RENDERER.open([Message("user", text)])
        if self.flaw == "ends with the question":
            self.context = tuple(byte_tokenizer().encode(text))
        await trio.lowlevel.checkpoint()
        self.begun = True
        if self.flaw == "no tokens":
            return (), RENDERER.stop
        return self.context, () if self.flaw == "no stop" else RENDERER.stop

    async def step(self, action: Sequence[int], *, extra: ActionExtra | None = None) -> StepResult:
        if self.state.over and self.flaw in ("a wordless end", "an accident after the end"):
            raise RuntimeError("no") if self.flaw == "a wordless end" else AttributeError("'NoneType' has no 'step'")
        if self.state.over and self.flaw != "no end of the end":
            raise RuntimeError("the episode has ended; an env is one episode, so make another")
        message = RENDERER.parse(action).message
        said = message.content
        self.fail(message)
        await self.wait()
        self.state.turns += 1
        self.state.over = not self.flaw.startswith("endless") and (said == "end" or self.state.turns == 5)
        reward = float(said == "end")
        if self.flaw == "reward that is no number":
            reward = math.nan
        if self.state.over:
            reason = StopReason.ENV_ERROR if self.flaw == "fault as an ending" else None
            return StepResult(reward, True, stop_reason=reason)
        reply = RENDERER.extend([Message("user", self.reply())], after=action)
        self.context = (*self.context, *action, *reply)
        if self.flaw == "silent rewrite":
            self.context = self.context[5:]
        metrics: Any = {"mood": "good"} if self.flaw == "metrics that are no numbers" else {}
        return StepResult(reward, False, self.context, RENDERER.stop, metrics=metrics)

    def fail(self, message: Message) -> None:
        """What a model says must not do this."""
        said = message.content
        if self.flaw == "fails on nothing" and not said:
            raise KeyError("move")
        if self.flaw == "fails on signs" and "\0" in said:
            raise ValueError("embedded null byte")
        if self.flaw == "fails on length" and len(said) > 50_000:
            raise MemoryError("too long")
        if self.flaw == "fails on a call" and message.calls:
            raise TypeError("no tools here")

    def reply(self) -> str:
        """What is answered."""
        if self.flaw in ("draws globally", "seeds the global generator"):
            return str(random.random())
        if self.flaw == "draws globally with numpy":
            return str(np.random.rand())
        if self.flaw == "reads and puts back":
            kept = random.getstate()
            try:
                return str(random.random())
            finally:
                random.setstate(kept)
        if self.flaw == "one state for all":
            return str(self.group is SHARED["current"])
        return "No."

    async def leave(self) -> None:
        """Leave something behind."""
        if self.flaw == "leaves a thread":
            threading.Thread(target=RELEASED.wait, name="forgotten").start()
        if self.flaw == "leaves a process":
            STARTED.append(started("sleep", "20"))
        if self.flaw == "leaves a file":
            LEAKED.append(os.open(os.devnull, os.O_RDONLY))
        if self.flaw == "leaves a folder":
            tempfile.mkdtemp()
        if self.flaw == "leaves a task":
            trio.lowlevel.spawn_system_task(trio.sleep_forever, name="forgotten")

    async def wait(self) -> None:
        """What takes time."""
        if self.flaw == "hangs":
            await trio.sleep_forever()
        if self.flaw == "leaks when it is cancelled":
            LEAKED.append(os.open(os.devnull, os.O_RDONLY))
            await trio.lowlevel.checkpoint()
            os.close(LEAKED.pop())
        if self.flaw == "will not stop":
            try:
                await trio.lowlevel.checkpoint()
            except trio.Cancelled:
                with trio.CancelScope(shield=True):
                    await trio.sleep(1)
                raise
        await trio.lowlevel.checkpoint()

    async def conclude(self, reason: StopReason) -> Conclusion | None:
        return Conclusion(math.nan) if self.flaw == "endless, and graded with no number" else None

    async def close(self) -> None:
        if self.flaw == "closes only what was begun":
            assert self.begun


@dataclass(frozen=True)
class FlawedBuilder(EnvGroupBuilder):
    """A group of two."""

    flaw: str = ""
    held: Any = None

    async def make_envs(self) -> Sequence[Env]:
        if self.flaw == "leaks while it makes":
            LEAKED.append(os.open(os.devnull, os.O_RDONLY))
            await trio.lowlevel.checkpoint()
            os.close(LEAKED.pop())
        group = object()
        return [] if self.flaw == "no envs" else [Flawed(self.flaw, member, group) for member in range(2)]

    async def compute_group_rewards(self, trajectories_G: Any, envs_G: Any) -> Any:
        if self.flaw == "rewards that count on everybody":
            return [(float(envs_G[1].member == i), {}) for i in range(2)]
        count = 2 if self.flaw == "rewards for all, whoever is left" else len(envs_G)
        count = 1 if self.flaw == "one reward for all" else count
        return [(math.inf if self.flaw == "infinite rewards" else 0.0, {})] * count

    def describe(self) -> str:
        return f"{id(self)}" if self.flaw == "another name each time" else "say end"


def ends(context: str, turn: int) -> str:
    """A good player, who takes three turns."""
    return "end" if turn == 2 else "soon"


FLAWS = {
    "no envs": r"\[start\].*gave no env",
    "another name each time": r"\[pickles\] the builder says",
    "another opening each time": r"\[(pickles|start)\].*open with (other|different) tokens",
    "every member for itself": r"\[start\] the 2 members of the group open with different tokens",
    "ends with the question": r"\[start\] the first observation of member \d ends with 'Say end.'; expected it to",
    "no tokens": r"\[start\].*the first observation is \(\); expected token ids",
    "no stop": r"\[start\].*stop condition.*is \(\); expected",
    "fails on nothing": r"turn 1: step raised KeyError: 'move'; expected a reply or an ending",
    "fails on signs": r"\[turns: garbage\].*turn \d: step raised ValueError: embedded null byte",
    "fails on length": r"\[turns: huge\].*step raised MemoryError",
    "fails on a call": r"\[turns: (malformed|wrong)_call\].*step raised TypeError",
    "endless": r"\[turns: player\] member 0 was still playing after 12 turns; expected an end within 6",
    "endless, and graded with no number": r"conclude\(MAX_TURNS\) gave the reward nan; expected a finite number",
    "hangs": r"had not ended after 0\.5 s",
    "reward that is no number": r"turn 1: the reward is nan; expected a finite number",
    "metrics that are no numbers": r"turn 1: step raised TypeError: StepResult: metrics\['mood'\]='good': expected",
    "silent rewrite": r"turn 1: the next observation does not begin with.*or a `rewrite`",
    "fault as an ending": r"the episode ended with ENV_ERROR; expected an ending that is no fault",
    "starts twice": r"\[after_the_end\].*a second initial_observation\(\) was answered as if nothing had happened",
    "no end of the end": r"\[after_the_end\].*step\(\) after the end was answered as if nothing had happened",
    "a wordless end": r"\[after_the_end\].*raised RuntimeError\('no'\); expected a text that says what is wrong",
    "an accident after the end": r"\[after_the_end\].*raised AttributeError",
    "draws globally": r"\[repeats\].*member 0 has another observation of turn 2: from token",
    "draws globally with numpy": r"\[repeats\].*member 0 has another observation of turn 2",
    "reads and puts back": r"\[repeats\].*has another observation of turn 2",
    "seeds the global generator": r"\[(global_random|repeats)\]",
    "one state for all": r"\[independent\].*beside 4 other groups, member \d has another observation",
    "one reward for all": r"gave 1 rewards for 2 members",
    "rewards for all, whoever is left": r"gave 2 rewards for 1 members; expected one \(reward, metrics\) for each",
    "rewards that count on everybody": r"compute_group_rewards raised IndexError for 1 of 2 members",
    "infinite rewards": r"member 0 the reward inf; expected a finite number",
    "leaves a thread": r"\[leaves_nothing\].*left threads: forgotten",
    "leaves a process": r"\[leaves_nothing\].*left processes: sleep, pid \d+",
    "leaves a file": r"\[leaves_nothing\].*left files: /dev/null \(2 times\)",
    "leaves a folder": r"\[leaves_nothing\].*left temporary: ",
    "leaves a task": r"\[leaves_nothing\].*left tasks: forgotten",
    "leaks when it is cancelled": r"\[cancelled at step \d+ of \d+\] left behind: files: /dev/null",
    "leaks while it makes": r"\[cancelled at step \d+ of \d+\] left behind: files: /dev/null",
    "will not stop": r"\[cancelled at step \d+ of \d+\] it took 1\.\d s to end; expected at most 0\.5",
    "closes only what was begun": r"close raised A",
}

SETTINGS: dict[str, Any] = {"turns": 12, "ends_within": 6}


@pytest.mark.slow
@pytest.mark.parametrize("flaw", FLAWS)
async def test_a_flaw_is_caught_by_its_check(flaw: str) -> None:
    settings = {**SETTINGS, "patience": 0.5, "seconds": 0.5 if flaw == "hangs" else 20.0}
    try:
        with pytest.raises(Nonconforming, match=FLAWS[flaw]):
            await check_environment(FlawedBuilder(flaw), player=ends, **settings)
    finally:
        while LEAKED:
            os.close(LEAKED.pop())
        while STARTED:
            with STARTED.pop() as process:
                process.kill()
        RELEASED.set()
        for thread in threading.enumerate():
            if thread.name == "forgotten":
                thread.join()
        RELEASED.clear()


async def test_without_a_flaw_every_check_passes_and_is_told() -> None:
    told: list[str] = []
    await check_environment(FlawedBuilder(), player=ends, say=told.append, **SETTINGS)
    assert told == list(CHECKS)


class Asyncio(MessageEnv):
    """Two turns, each answered from a task of asyncio."""

    def __init__(self, task: Task) -> None:
        self.said: list[Message] = []

    @property
    def messages(self) -> Sequence[Message]:
        return self.said

    async def reset(self, task: Task) -> Sequence[Message]:
        if self.said:
            raise RuntimeError("it was started before: an env is one episode")
        self.said.append(Message("user", task.prompt))
        return self.said

    async def step(self, message: Message) -> MessageStepResult:
        if len(self.said) == 5:
            raise RuntimeError("it is over: an env is one episode")
        await asyncio.create_task(asyncio.sleep(0))
        self.said += [message, Message("user", "go on")]
        return MessageStepResult(terminated=len(self.said) == 5, messages=self.said[-1:], reward=1.0)


async def test_an_environment_of_an_asyncio_library_is_checked_on_a_loop_of_its_own() -> None:
    builder = MessageEnvGroupBuilder(Task("say"), asyncio_envs(Asyncio), RENDERER, 2)
    await check_environment(builder, ends_within=2, cancellations=4)


async def test_a_builder_that_cannot_travel_is_named() -> None:
    with pytest.raises(
        Nonconforming, match=r"\[pickles\] FlawedBuilder cannot be pickled: .*; expected a builder that"
    ):
        await check_environment(FlawedBuilder(held=lambda: None))


async def test_a_check_can_be_left_out_and_a_wrong_name_is_refused() -> None:
    await check_environment(FlawedBuilder("no end of the end"), without=["after_the_end"], **SETTINGS)
    with pytest.raises(ValueError, match="without names speed: the checks are pickles, start"):
        await check_environment(FlawedBuilder(), without=["speed"])
    wrongs: list[dict[str, Any]] = [{"turns": 0}, {"ends_within": 99}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="expected"):
            await check_environment(FlawedBuilder(), **wrong)


async def test_a_check_leaves_the_process_as_it_was() -> None:
    before, folder, state = held(), tempfile.gettempdir(), random.getstate()
    await check_environment(FlawedBuilder(), player=ends, **SETTINGS)
    after = held()
    assert (after.threads, after.files, after.tasks, after.processes) == (
        before.threads, before.files, before.tasks, before.processes,
    )  # fmt: skip
    assert tempfile.gettempdir() == folder
    assert random.getstate() == state


# --- the command, and the environment in envs/README.md -------------------------------------------

README = (Path(__file__).parents[2] / "envs" / "README.md").read_text()
PROGRAM, PLAYER = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The program of the README and its player, as the module `lock` in the current folder."""
    (tmp_path / "lock.py").write_text(f"{PROGRAM}\n\n{PLAYER}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "lock", raising=False)
    yield importlib.import_module("lock")
    sys.modules.pop("lock")


def test_the_environment_in_the_readme_has_sixty_lines_and_passes(
    lock: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sum(bool(line.strip()) for line in PROGRAM.splitlines()) <= 60
    command = re.search(r"^python -m jaxrl\.runtime\.conformance (lock:Locks .*)$", README, re.MULTILINE)
    assert command
    assert main([*command[1].split(), "batch_size=2", "--cancellations", "4"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "MessageEnvGroupBuilder: Code? Digits 1-3."
    assert said[1:] == [f"ok {name}" for name in CHECKS]


def test_the_command_says_what_failed(lock: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    lock.Lock.step = lambda self, message: 1 / 0
    assert main(["lock:Locks"]) == 1
    assert re.search(r"FAILED \[start\] Lock, member \d, turn 1: step raised ZeroDiv", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "teaches"),
    [
        (["lock"], "expected module:name"),
        (["lock:Nobody"], "the module lock has no Nobody"),
        (["lock:Locks", "batch_sise=3"], "batch_sise"),
        (["lock:Lock"], "Lock is an environment: expected its RLDatasetBuilder, or a function"),
        (["lock:Careless"], "expected an EnvGroupBuilder or an RLDatasetBuilder"),
    ],
)
def test_the_command_says_what_was_typed_wrong(arguments: list[str], teaches: str, lock: ModuleType) -> None:
    with pytest.raises((ValueError, EntrypointException), match=teaches):
        main(arguments)


@pytest.mark.slow
def test_the_environment_in_the_readme_is_trained_on(lock: ModuleType, tmp_path: Path) -> None:
    arguments = ["max_steps=2", "warm_start.steps=2", "warm_start.batch_size=4", "dataset_builder.batch_size=2"]
    arguments += ["engine.slots=16", "engine.context=256", "engine.position_buckets=256", "packing.widths=256"]
    arguments += ["engine.prompts=0", "engine.prompt_context=1", "engine.row_buckets=16", "eval_every=0"]
    run = train(parse([*arguments, f"log_path={tmp_path / 'run'}"], **lock.DEFAULTS))
    assert [m["step"] for m in read_metrics(run / "metrics.jsonl")] == [0, 1]


def test_the_readme_has_a_section_for_every_environment() -> None:
    folders = [p.name for p in (Path(__file__).parents[2] / "envs").iterdir() if (p / "__init__.py").is_file()]
    assert [name for name in folders if f"## [{name}]({name}/)" not in README] == []
