"""Demonstrations as sequences: the assistant's tokens are learned, in the contexts that an episode would see."""

import numpy as np
import pytest

from envs.guess_number import demonstrate, mixed_player, tasks
from jaxrl.chat.families import renderer_for
from jaxrl.chat.supervised import Supervised, TrainOnWhat, supervise, supervised_datum
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.chat.transcript import act, begin, observe
from jaxrl.types import Message, ToolCall, ToolSpec

BYTES = byte_tokenizer()
RENDERER = renderer_for(BYTES)
STRIPPING = renderer_for(BYTES, "qwen3", thinking="strip")
LOOK = ToolSpec("look", "Look it up.", {"type": "object", "properties": {}})
CONVERSATION = [
    Message("system", "Play."),
    Message("user", "Guess 1-8."),
    Message("assistant", "4"),
    Message("user", "higher"),
    Message("assistant", "6", thinking="half of it"),
    Message("user", "lower"),
    Message("assistant", "5"),
]
WITH_TOOLS = [
    Message("user", "What is it?"),
    Message("assistant", "", tool_calls=(ToolCall("look", "{}"),)),
    Message("tool", "42"),
    Message("tool", "43"),
    Message("assistant", "42"),
]


def learned(sequence: Supervised) -> list[str]:
    """The runs of learned tokens, as text."""
    runs, text = [], []
    for token, on in zip(sequence.tokens, sequence.mask, strict=True):
        if on:
            text.append(token)
        elif text:
            runs.append(BYTES.decode(text))
            text = []
    return [*runs, *([BYTES.decode(text)] if text else [])]


def test_exactly_the_assistants_tokens_are_learned() -> None:
    (sequence,) = supervise(RENDERER, CONVERSATION)
    assert learned(sequence) == ["4<|im_end|>", "<think>\nhalf of it\n</think>\n\n6<|im_end|>", "5<|im_end|>"]
    turns = [RENDERER.turn(m) for m in CONVERSATION if m.role == "assistant"]
    assert sum(sequence.mask) == sum(map(len, turns))
    assert [t for t, on in zip(*sequence, strict=True) if on] == [t for turn in turns for t in turn]


@pytest.mark.parametrize("messages", [CONVERSATION, WITH_TOOLS])
def test_I1_the_tokens_are_those_an_episode_with_these_messages_holds(messages: list[Message]) -> None:
    tools = (LOOK,) if messages is WITH_TOOLS else ()
    (sequence,) = supervise(RENDERER, messages, tools)
    first = next(i for i, m in enumerate(messages) if m.role == "assistant")
    transcript, waiting = begin(RENDERER, messages[:first], tools), []
    for message in messages[first:]:
        if message.role != "assistant":
            waiting.append(message)
            continue
        if waiting:
            transcript, _ = observe(transcript, waiting)
            waiting = []
        transcript = act(transcript, RENDERER.turn(message))
    assert sequence.tokens == transcript.tokens
    mask = [segment.kind == "action" for segment in transcript.segments for _ in segment.tokens]
    assert list(sequence.mask) == mask


@pytest.mark.parametrize(
    ("train_on", "answers"),
    [
        (TrainOnWhat.ALL_ASSISTANT_MESSAGES, ["4", "<think>\nhalf of it\n</think>\n\n6", "5"]),
        (TrainOnWhat.LAST_ASSISTANT_MESSAGE, ["5"]),
        (TrainOnWhat.LAST_ASSISTANT_TURN, ["5"]),
        ([2], ["4"]),
        ({6, 2}, ["4", "5"]),
    ],
)
def test_the_messages_that_are_learned_can_be_chosen(train_on: TrainOnWhat | set[int], answers: list[str]) -> None:
    (sequence,) = supervise(RENDERER, CONVERSATION, train_on=train_on)
    assert learned(sequence) == [f"{answer}<|im_end|>" for answer in answers]
    (whole,) = supervise(RENDERER, CONVERSATION)
    assert sequence.tokens == whole.tokens[: len(sequence.tokens)], "in the context of all"
    assert sequence.mask[-1], "and nothing follows what is learned"


def test_the_last_turn_holds_the_calls_on_the_way_to_the_answer() -> None:
    more = [*CONVERSATION, *WITH_TOOLS]
    (sequence,) = supervise(RENDERER, more, (LOOK,), train_on=TrainOnWhat.LAST_ASSISTANT_TURN)
    call, answer = learned(sequence)
    assert call.startswith("<tool_call>")
    assert answer == "42<|im_end|>"
    (unasked,) = supervise(RENDERER, [Message("system", "Play."), *CONVERSATION[2:3]], train_on="last_assistant_turn")
    assert learned(unasked) == ["4<|im_end|>"]


def test_sequences_in_which_nothing_is_learned_are_left_out() -> None:
    thoughtful = [m if m.role != "assistant" else Message("assistant", m.content, thinking="hm") for m in CONVERSATION]
    sequences = supervise(STRIPPING, thoughtful, train_on=[4])
    assert [learned(s) for s in sequences] == [["<think>\nhm\n</think>\n\n6<|im_end|>"]]
    assert sequences == supervise(STRIPPING, thoughtful)[1:2]


@pytest.mark.parametrize("train_on", [[3], [0], [99], [-1], []])
def test_I12_messages_that_cannot_be_learned_are_refused(train_on: list[int]) -> None:
    with pytest.raises(ValueError, match=r"train_on.*\[2, 4, 6\]"):
        supervise(RENDERER, CONVERSATION, train_on=train_on)


def test_I12_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="'everything' is not a valid TrainOnWhat"):
        supervise(RENDERER, CONVERSATION, train_on="everything")


@pytest.mark.parametrize("train_on", TrainOnWhat)
def test_a_thought_that_the_prompt_opens_is_learned_from_its_first_word(train_on: TrainOnWhat) -> None:
    renderer = renderer_for(BYTES, "qwen3_thinking")
    thoughtful = [m if m.role != "assistant" else Message("assistant", m.content, thinking="hm") for m in CONVERSATION]
    (sequence,) = supervise(renderer, thoughtful, train_on=train_on)
    guesses = "465" if train_on is TrainOnWhat.ALL_ASSISTANT_MESSAGES else "5"
    assert learned(sequence) == [f"hm\n</think>\n\n{guess}<|im_end|>" for guess in guesses]
    assert BYTES.decode(sequence.tokens[: sequence.mask.index(True)]).endswith("<|im_start|>assistant\n<think>\n")


def test_the_renderer_that_asks_a_template_gives_the_same_sequences() -> None:
    asked = renderer_for(BYTES, "template")
    for messages, tools in ((CONVERSATION, ()), (WITH_TOOLS, (LOOK,))):
        assert supervise(asked, messages, tools) == supervise(RENDERER, messages, tools)


def test_what_follows_the_last_assistant_turn_is_left_out() -> None:
    assert supervise(RENDERER, [*CONVERSATION, Message("user", "right!")]) == supervise(RENDERER, CONVERSATION)


def test_stripped_thoughts_start_a_new_sequence_and_every_turn_is_learned_once() -> None:
    thoughtful = [m if m.role != "assistant" else Message("assistant", m.content, thinking="hm") for m in CONVERSATION]
    sequences = supervise(STRIPPING, thoughtful)
    texts = [learned(s) for s in sequences]
    assert texts == [[f"<think>\nhm\n</think>\n\n{guess}<|im_end|>"] for guess in "465"]
    shown = BYTES.decode(sequences[-1].tokens)
    assert shown.count("<think>") == 1, "earlier thoughts are not in the context"
    assert sequences[-1].tokens[: len(STRIPPING.open(thoughtful[:2]))] == STRIPPING.open(thoughtful[:2])


def test_tool_answers_are_shown_not_learned() -> None:
    (sequence,) = supervise(RENDERER, WITH_TOOLS, (LOOK,))
    call, answer = learned(sequence)
    assert call.startswith("<tool_call>")
    assert answer == "42<|im_end|>"
    assert '"look"' in BYTES.decode(sequence.tokens[: sequence.mask.index(True)])


@pytest.mark.parametrize("messages", [[], [Message("user", "hi")], [Message("assistant", "hi"), Message("user", "hi")]])
def test_a_demonstration_without_a_turn_to_learn_is_refused(messages: list[Message]) -> None:
    with pytest.raises(ValueError, match=f"a demonstration of {len(messages)} messages needs something before"):
        supervise(RENDERER, messages)


def test_a_datum_learns_what_the_mask_says_with_advantage_one() -> None:
    (sequence,) = supervise(RENDERER, CONVERSATION)
    datum = supervised_datum(sequence, episode=7)
    np.testing.assert_array_equal(datum.advantages, np.array(sequence.mask, np.float32))
    np.testing.assert_array_equal(datum.versions, np.where(sequence.mask, 0, -1))
    assert (datum.tokens.dtype, datum.mask.dtype, datum.logprobs.dtype) == (np.int32, np.bool_, np.float32)
    assert (datum.group, datum.episode) == (7, 7)
    assert not datum.mask[0]


def test_a_demonstrated_game_teaches_every_guess() -> None:
    (task,) = tasks("train", 1, high=32, turns=6)
    messages = demonstrate(task, mixed_player(0.5), np.random.default_rng(0))
    (sequence,) = supervise(RENDERER, messages)
    assert learned(sequence) == [f"{m.content}<|im_end|>" for m in messages if m.role == "assistant"]
