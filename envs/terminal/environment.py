"""A terminal task as an episode: the instruction, a `bash` tool in a shell that stays, and a grade at the end.

Knows messages, tools and trials; knows no tokens. An episode ends with a turn that makes no call: the work is handed
in, and graded. So it is when time or turns run out, since what was done by then counts. Where a task has several steps
the next one's instruction is the answer to handing in, and the one reward comes after the last.
"""

from collections.abc import Sequence
from pathlib import Path

from envs.terminal.harbor_task import HarborTask, load_task
from envs.terminal.sandbox import CommandResult, check_characters
from envs.terminal.trial import Trial, TrialOptions
from jaxrl.env import MessageEnv, MessageStepResult
from jaxrl.tools import ToolError, report_calls, tool, tool_table, tool_to_spec
from jaxrl.types import Conclusion, Message, Metrics, StopReason, Task, ToolSpec

INSTRUCTIONS = "Solve the task with bash. When it is solved, answer without a call."


def harbor_task(directory: Path) -> Task:
    """The `Task` of an episode of the Harbor task in `directory`, which is read. Errors: those of `load_task`."""
    loaded = load_task(directory)
    prompt = loaded.steps[0].instruction
    return Task(prompt, metadata={"directory": str(loaded.directory), "name": loaded.name, **_tags(loaded)})


def _tags(task: HarborTask) -> dict[str, str]:
    difficulty = task.metadata.get("difficulty")
    return {"difficulty": difficulty} if isinstance(difficulty, str) else {}


class HarborEnv(MessageEnv):
    """One attempt at the task that `task.metadata["directory"]` names.

    max_turns: turns of the model, after which what it did is graded. reward_key: which of several rewards counts; None
    is the one called reward, or else their mean. instructions: the system message, None for none. show_tools: describe
    the tool to the model; False is for one that learned to call it before, and makes every prompt shorter.
    max_malformed: malformed calls that are answered with their error; one more ends the episode.
    """

    def __init__(
        self,
        options: TrialOptions | None = None,
        *,
        max_turns: int | None = None,
        reward_key: str | None = None,
        instructions: str | None = INSTRUCTIONS,
        show_tools: bool = True,
        max_malformed: int = 3,
    ) -> None:
        if max_turns is not None and max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: expected at least 1, or None for no limit")
        self._options = options or TrialOptions()
        self._max_turns = max_turns
        self._reward_key = reward_key
        self._instructions = instructions
        self._show_tools = show_tools
        self._max_malformed = max_malformed
        self._tools = tool_table([tool(self.bash)])
        self._trial: Trial | None = None
        self._messages: list[Message] = []
        self._turns = self._malformed = self._timeouts = 0
        self._done = False

    @property
    def tool_specs(self) -> Sequence[ToolSpec]:
        return [tool_to_spec(each) for each in self._tools.values()] if self._show_tools else ()

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)

    async def reset(self, task: Task) -> Sequence[Message]:
        if self._trial is not None:
            raise RuntimeError("this HarborEnv was already reset; an env is one episode, so make a new one")
        self._trial = Trial(load_task(Path(task.metadata["directory"])), self._options)
        step = await self._trial.start()
        opening = [] if self._instructions is None else [Message("system", self._instructions)]
        self._messages = [*opening, Message("user", step.instruction)]
        return self.messages

    async def bash(self, command: str) -> str:
        """Run a command in a shell that stays open.

        Args:
            command: bash
        """
        assert self._trial is not None, "there is no call before reset"
        if self._trial.timed_out:
            raise ToolError("the time for the task is up")
        try:
            check_characters(command)
        except ValueError as error:
            raise ToolError(str(error)) from None
        return told(await self._trial.run(command))

    async def step(self, message: Message) -> MessageStepResult:
        trial = self._trial
        if trial is None or not trial.playing or self._done:
            raise RuntimeError("no episode is running; call reset once, and step only until it ends")
        self._messages.append(message)
        self._turns += 1
        if not message.calls:
            return await self._hand_in(trial, {}, ())
        report = await report_calls(self._tools, message, call_seconds=None)  # the shell has limits of its own
        self._messages.extend(report.messages)
        self._malformed += int(report.metrics["malformed_calls"])
        if self._malformed > self._max_malformed:
            return await self._finish(trial, report.metrics, terminated=True)
        if self._turns == self._max_turns:
            return await self._finish(trial, report.metrics, terminated=False)
        if trial.timed_out:
            return await self._hand_in(trial, report.metrics, report.messages)
        return MessageStepResult(messages=report.messages, metrics=report.metrics)

    async def _hand_in(self, trial: Trial, metrics: Metrics, said: Sequence[Message]) -> MessageStepResult:
        """Grade the step; go on with the next one, or end. Time that ran out hands in too, as a truncation."""
        timed_out = trial.timed_out
        self._timeouts += timed_out
        if self._turns == self._max_turns:
            return await self._finish(trial, metrics, terminated=not timed_out)
        if await trial.hand_in():
            told_next = Message("user", trial.step.instruction)
            self._messages.append(told_next)
            return MessageStepResult(messages=(*said, told_next), metrics=metrics)
        return self._ended(trial, metrics, terminated=not timed_out, unplayed=False)

    async def _finish(self, trial: Trial, metrics: Metrics, *, terminated: bool) -> MessageStepResult:
        """Grade the step and end the episode; steps that were never reached count as 0."""
        await trial.hand_in()
        return self._ended(trial, metrics, terminated=terminated, unplayed=not trial.over)

    def _ended(self, trial: Trial, metrics: Metrics, *, terminated: bool, unplayed: bool) -> MessageStepResult:
        self._done = True
        reward = trial.reward(self._reward_key, unplayed=unplayed)
        metrics = {**metrics, **self._metrics(trial, reward)}
        return MessageStepResult(terminated=terminated, truncated=not terminated, reward=reward, metrics=metrics)

    def _metrics(self, trial: Trial, reward: float) -> dict[str, float]:
        found = {"solved": float(reward >= 1.0), "agent_timeouts": float(self._timeouts)}
        if len(trial.task.steps) > 1:
            found["steps_graded"] = float(len(trial.graded))
        for key, value in trial.graded[-1].rewards.items():
            found[f"reward/{key}"] = value
        return found

    async def conclude(self, reason: StopReason) -> Conclusion | None:
        """Grade what was done before a limit or a timeout. None where there was nothing to work on yet."""
        trial = self._trial
        if trial is None or not trial.playing or self._done:
            return None
        result = await self._finish(trial, {}, terminated=False)
        return Conclusion(result.reward, result.metrics)

    async def close(self) -> None:
        """Remove the sandbox."""
        if self._trial is not None:
            await self._trial.aclose()


def told(result: CommandResult) -> str:
    """What the model reads of a command: its output, and what else happened to it."""
    parts = [result.stdout.rstrip("\n")] if result.stdout.strip() else []
    if result.exit_code:
        parts.append(f"[exit code {result.exit_code}]")
    if result.notice:
        parts.append(f"[{result.notice}]")
    return "\n".join(parts) or "[no output]"


def make_env(
    task: Task,
    *,
    options: TrialOptions | None = None,
    max_turns: int | None = None,
    reward_key: str | None = None,
    instructions: str | None = INSTRUCTIONS,
    show_tools: bool = True,
) -> HarborEnv:
    """An env factory: a fresh env; the task arrives with `reset`. Options: `functools.partial(make_env, ...)`."""
    kind = {"max_turns": max_turns, "reward_key": reward_key, "instructions": instructions}
    return HarborEnv(options, **kind, show_tools=show_tools)
