"""Demonstrated conversations as token sequences with masks: which tokens a supervised step learns.

Knows renderers and transcripts. The tokens are those an episode with the same messages would have produced, so a
warm start trains exactly the contexts that rollouts will see.
"""

import enum
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.chat.renderer import Renderer
from jaxrl.chat.transcript import act, begin, observe
from jaxrl.types import Datum, Message, ToolSpec


class Supervised(NamedTuple):
    """One sequence: ids, and True where the assistant is speaking (stop tokens included)."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]


class TrainOnWhat(enum.StrEnum):
    """Which of the assistant's messages after the opening are learned; the others are context.

    LAST_ASSISTANT_TURN: those after the last user message, tool calls on the way to the answer included.
    """

    ALL_ASSISTANT_MESSAGES = "all_assistant_messages"
    LAST_ASSISTANT_MESSAGE = "last_assistant_message"
    LAST_ASSISTANT_TURN = "last_assistant_turn"


def supervise(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    *,
    train_on: TrainOnWhat | str | Collection[int] = TrainOnWhat.ALL_ASSISTANT_MESSAGES,
) -> list[Supervised]:
    """Sequences in which each of the chosen assistant messages is learned exactly once, and nothing else.

    One sequence, unless the renderer rewrites history (thoughts stripped): then each rewrite starts a new one. A
    sequence ends with the last message that is learned in it.
    train_on: which of them, or their indices in `messages`. The opening is all before the first assistant message.
    Raises ValueError for a conversation in which the assistant never speaks after another role, and for a choice of
    messages that are not such.
    """
    first = next((i for i, m in enumerate(messages) if m.role == "assistant"), 0)
    if not first:
        raise ValueError(
            f"a demonstration of {len(messages)} messages needs something before its first assistant turn, and one "
            "such turn at least"
        )
    turns = [i for i, m in enumerate(messages) if m.role == "assistant"]
    learned = _learned(messages, turns, train_on)
    transcript = begin(renderer, messages[:first], tools)
    done: list[Supervised] = []
    mask: list[bool] = []  # of the sequence under way
    for i, following in zip(turns, [*turns[1:], len(messages)], strict=True):
        mask += [False] * (len(transcript.tokens) - len(mask))
        transcript = act(transcript, renderer.turn(messages[i]))
        mask += [i in learned] * (len(transcript.tokens) - len(mask))
        if i == max(learned):
            break
        grown, rewrite = observe(transcript, messages[i + 1 : following])
        if rewrite:
            done.append(_until_learned(transcript.tokens, mask))
            mask = []
        transcript = grown
    return [sequence for sequence in [*done, _until_learned(transcript.tokens, mask)] if sequence.tokens]


def _learned(messages: Sequence[Message], turns: Sequence[int], train_on: str | Collection[int]) -> set[int]:
    """Indices of the messages to learn."""
    if isinstance(train_on, str):
        last_user = max(i for i, m in enumerate(messages[: turns[-1]]) if m.role == "user" or i < turns[0])
        starts = {
            TrainOnWhat.ALL_ASSISTANT_MESSAGES: 0,
            TrainOnWhat.LAST_ASSISTANT_MESSAGE: turns[-1],
            TrainOnWhat.LAST_ASSISTANT_TURN: last_user,
        }
        return {i for i in turns if i >= starts[TrainOnWhat(train_on)]}
    if wrong := sorted(set(train_on) - set(turns)):
        raise ValueError(
            f"train_on={sorted(train_on)}: the messages {wrong} are not the assistant's after the opening, which are "
            f"{list(turns)}"
        )
    if not train_on:
        raise ValueError(f"train_on is empty, so nothing would be learned: choose some of the messages {list(turns)}")
    return set(train_on)


def _until_learned(tokens: Sequence[int], mask: Sequence[bool]) -> Supervised:
    """The sequence up to its last learned token; empty when nothing is learned in it."""
    end = max((i + 1 for i, on in enumerate(mask) if on), default=0)
    return Supervised(tuple(tokens[:end]), tuple(mask[:end]))


def supervised_datum(sequence: Supervised, *, episode: int) -> Datum:
    """A datum for the cross-entropy loss: advantage 1, no sampler."""
    mask = np.array(sequence.mask, bool)
    return Datum(
        tokens=np.array(sequence.tokens, np.int32),
        mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        advantages=mask.astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        group=episode,
        episode=episode,
    )
