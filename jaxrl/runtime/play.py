"""A person plays an environment in the place of the model.

Knows the token-level Env, and a renderer for two things: to show ids as text, and to write what was typed as a turn
of the model. So it plays every environment, message-level ones included, and needs no engine and no weights.

    an ordinary line            is the turn's text
    /call lookup {"key": "x"}   is a tool call; so is a line {"name": "lookup", "arguments": {"key": "x"}}
    a line ending in \\          goes on in the next line
    end of input, Ctrl-D        leaves the episode
"""

import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack

import trio

from jaxrl.chat.renderer import Renderer
from jaxrl.chat.tool_calls import read_call
from jaxrl.env import (
    ActionExtra,
    Env,
    EnvGroupBuilder,
    Observation,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
    StopCondition,
)
from jaxrl.runtime.asyncio_bridge import open_asyncio
from jaxrl.runtime.rollout import bounded
from jaxrl.runtime.view import reward_text, visible
from jaxrl.types import MalformedToolCall, Message, Sample, StopReason, ToolCall, Trajectory, Transition, common_prefix

Read = Callable[[str], Awaitable[str]]
"""Show a prompt and wait for a line. Raises EOFError when there are no more."""

Write = Callable[[str], None]
"""Show a text, which ends its line."""

PROMPT = "> "

_JSON_CALL = re.compile(r'\{\s*"name"\s*:')
_SLASH_CALL = re.compile(r"/call\s+(\S+)\s*(.*)", re.DOTALL)


async def play(
    builder: EnvGroupBuilder, renderer: Renderer, *, read: Read, write: Write, member: int = 0
) -> Trajectory:
    """Play one member of a group to its end, or until the end of input (then the ending is CANCELLED).

    The actions of the trajectory have log-probs that are not a number and version -1: nothing can train on them.
    Resources: the group's envs, all closed, and the group, cleaned up, exactly once, also after an error or Ctrl-C.
    Errors: the environment's own, with the turn and the env in a note; ValueError for a member that is not there, and
    for a group whose members wait for each other's turns.
    """
    if builder.coupled:
        raise ValueError(
            f"{builder.describe()!r} is played by the members of its group with each other, and one person cannot be "
            "all of them: say split=test, or choose another opponent"
        )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(open_asyncio())
        stack.push_async_callback(bounded, builder.cleanup)
        envs = await builder.make_envs()
        for env in envs:
            stack.push_async_callback(bounded, env.close)
        if not 0 <= member < len(envs):
            raise ValueError(f"member={member}: the group has members 0 to {len(envs) - 1}")
        trajectory = await _episode(envs[member], renderer, read, write)
    count = len(trajectory.transitions)
    turns = f"{count} turn{'s' * (count != 1)}"
    write(f"[the end: {trajectory.stop_reason.value}, reward {reward_text(trajectory.reward)} in {turns}]")
    return trajectory


async def play_dataset(
    dataset_builder: RLDatasetBuilder,
    renderer: Renderer,
    *,
    split: str = "test",
    index: int = 0,
    read: Read | None = None,
    write: Write = print,
) -> Trajectory:
    """Play the group at place `index` of a split, at the terminal unless told otherwise."""
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r}: expected 'train' or 'test'")
    train, test = await dataset_builder(renderer)
    dataset = train if split == "train" else test
    if dataset is None:
        raise ValueError("there is no held-out data to play; say split=train")
    builder = group_at(dataset, index)
    write(f"[{visible(builder.describe())}]\n")
    return await play(builder, renderer, read=read or terminal_reader(), write=write)


def group_at(dataset: RLDataset, index: int) -> EnvGroupBuilder:
    """The group at place `index`, counted through all batches."""
    seen = 0
    for batch in map(dataset.get_batch, range(len(dataset) if index >= 0 else 0)):
        if index < seen + len(batch):
            return batch[index - seen]
        seen += len(batch)
    raise ValueError(
        f"index={index}: expected 0 or more" + (f", and less than the {seen} groups of the data" * (index >= 0))
    )


def turn_tokens(said: str | ToolCall, renderer: Renderer, stop: StopCondition) -> tuple[int, ...]:
    """What was typed, as the model would have sampled it: its ids, then the first of the stops.

    Spellings of special tokens in a text stay text. A call has the form that the model's family gives it.
    """
    if isinstance(said, str):
        body = tuple(renderer.tokenizer.encode(said))
    else:
        body = renderer.turn(Message("assistant", tool_calls=(said,)))[:-1]  # less the stop token
    first = stop[0] if stop else ()
    if isinstance(first, str):
        return (*body, *renderer.tokenizer.encode(first))
    return (*body, first) if isinstance(first, int) else body


def terminal_reader() -> Read:
    """Lines of standard input, waited for in a thread.

    The thread is left behind on Ctrl-C. It sits in a plain read of the descriptor, which holds no lock of Python's:
    one inside `input` would hold that of sys.stdin, and the interpreter could not end.
    """
    held = bytearray()

    async def read(prompt: str) -> str:
        print(prompt, end="", flush=True)
        while b"\n" not in held:
            more = await trio.to_thread.run_sync(os.read, 0, 1 << 16, abandon_on_cancel=True)
            if not more and not held:
                raise EOFError
            held.extend(more or b"\n")  # a last line that lacks its end
        line, _, rest = bytes(held).partition(b"\n")
        held[:] = rest
        return line.decode("utf-8", "replace").removesuffix("\r")

    return read


# --- one episode ---------------------------------------------------------------------------------


async def _episode(env: Env, renderer: Renderer, read: Read, write: Write) -> Trajectory:
    turns: list[Transition] = []
    try:
        reason = await _turns(env, renderer, read, write, turns)
    except Exception as error:
        error.add_note(f"in turn {len(turns) + 1} of {env.describe()}")
        raise
    return Trajectory(tuple(turns), reason)


async def _turns(env: Env, renderer: Renderer, read: Read, write: Write, turns: list[Transition]) -> StopReason:
    """Fill `turns` and say why they ended."""
    observation, stop = await env.initial_observation()
    held: Observation = ()
    rewrite: str | None = None
    while True:
        write(_news(held, observation, rewrite, renderer))
        try:
            action = turn_tokens(await _typed(read, write), renderer, stop)
        except EOFError:
            return StopReason.CANCELLED
        ended = "stop" if stop else "length"
        result = await env.step(action, extra=ActionExtra(ended))
        sample = Sample(action, (float("nan"),) * len(action), (-1,) * len(action), ended)
        turns.append(
            Transition(
                observation, sample, result.reward, result.episode_done, result.metrics, result.logs, rewrite=rewrite
            )
        )
        if told := _outcome(result):
            write(told)
        if result.episode_done:
            return result.stop_reason or StopReason.TERMINATED
        held = (*observation, *action)
        observation, stop, rewrite = result.next_observation, result.next_stop_condition, result.rewrite


async def _typed(read: Read, write: Write) -> str | ToolCall:
    """The next turn: a text, or a call. A call that cannot be read is explained, and asked for again."""
    while True:
        text = await read(PROMPT)
        while text.endswith("\\"):
            text = f"{text[:-1]}\n{await read(PROMPT)}"
        call = _call(text)
        if not isinstance(call, MalformedToolCall):
            return text if call is None else call
        write(f"[not sent. {call.error}]")


def _call(text: str) -> ToolCall | MalformedToolCall | None:
    """The tool call that a typed line asks for; None for ordinary text."""
    if _JSON_CALL.match(text):
        return read_call(text)
    if not (slash := _SLASH_CALL.fullmatch(text)):
        return None
    name, arguments = slash.groups()
    checked = read_call(f'{{"name": "call", "arguments": {arguments or "{}"}}}')
    return checked if isinstance(checked, MalformedToolCall) else ToolCall(name, checked.arguments)


def _news(held: Observation, observation: Observation, rewrite: str | None, renderer: Renderer) -> str:
    """What the player has not seen yet. Special tokens are spelled; what would control the terminal is shown."""
    shared = common_prefix(held, observation)
    text = visible(renderer.tokenizer.decode(observation[shared:]))
    if shared == len(held):
        return text
    return f"[history rewritten after {shared} of {len(held)} tokens: {rewrite or 'no reason given'}]\n{text}"


def _outcome(result: StepResult) -> str:
    """One line about a step; nothing when there is nothing to say."""
    reward = [f"reward {reward_text(result.reward)}"] if result.reward or result.episode_done else []
    told = ", ".join([*reward, *_named(result.metrics), *_named(result.logs)])
    return f"[{told}]" if told else ""


def _named(values: Mapping[str, str | float]) -> Sequence[str]:
    return [f"{visible(k)} {visible(v) if isinstance(v, str) else reward_text(v)}" for k, v in values.items()]
