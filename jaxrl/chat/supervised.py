"""Demonstrated conversations as token sequences with masks: which tokens a supervised step learns.

Knows renderers and transcripts. The tokens are those an episode with the same messages would have produced, so a
warm start trains exactly the contexts that rollouts will see.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.chat.renderer import Renderer
from jaxrl.chat.transcript import act, begin, observe
from jaxrl.types import Datum, Message, ToolSpec


class Supervised(NamedTuple):
    """One sequence: ids, and True where the assistant is speaking (stop tokens included)."""

    tokens: tuple[int, ...]
    mask: tuple[bool, ...]


def supervise(renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[Supervised]:
    """Sequences in which every assistant turn after the opening is learned exactly once.

    One sequence, unless the renderer rewrites history (thoughts stripped): then each rewrite starts a new one.
    Raises ValueError for a conversation in which the assistant never speaks after another role.
    """
    first = next((i for i, m in enumerate(messages) if m.role == "assistant"), 0)
    if not first:
        raise ValueError(
            f"a demonstration of {len(messages)} messages needs something before its first assistant turn, and one "
            "such turn at least"
        )
    transcript = begin(renderer, messages[:first], tools)
    mask = [False] * len(transcript.tokens)
    done: list[Supervised] = []
    for i, message in enumerate(messages[first:], first):
        if message.role != "assistant":
            continue
        transcript = act(transcript, renderer.turn(message))
        mask += [True] * (len(transcript.tokens) - len(mask))
        replies = _until_assistant(messages[i + 1 :])
        if i + 1 + len(replies) == len(messages):  # nobody speaks after them, so nothing is learned from them
            return [*done, Supervised(transcript.tokens, tuple(mask))]
        grown, rewrite = observe(transcript, replies)
        if rewrite:
            done.append(Supervised(transcript.tokens, tuple(mask)))
            mask = []
        mask += [False] * (len(grown.tokens) - len(mask))
        transcript = grown
    return done


def _until_assistant(messages: Sequence[Message]) -> Sequence[Message]:
    return messages[: next((i for i, m in enumerate(messages) if m.role == "assistant"), len(messages))]


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
