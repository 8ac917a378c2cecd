"""Turns that could not be read, calls beyond their number, and what is said before a turn: the rules by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from episodes import BYTES, END, RENDERER, Echo, Script, ScriptedEngine, said

from jaxrl.algo.data import trajectory_to_data
from jaxrl.env import MessageStepResult
from jaxrl.runtime.episode import Limits, run_episode
from jaxrl.runtime.message_env import EnvFromMessageEnv, TurnRules, announce_turns_left
from jaxrl.types import Message, StopReason, Task, ToolCall, Trajectory, Transition

TASK = Task("hi")
CALL, END_CALL = (BYTES.special(t) for t in ("<tool_call>", "</tool_call>"))
BROKEN = (CALL, 65, END)
"""A call that never closes: broken framing."""
UNREAD = (CALL, *b"not json", END_CALL, END)
"""Well framed, and not one call that could be read."""
GOOD = said("yes")


def calls(*names: str) -> tuple[int, ...]:
    """A turn that calls these."""
    body = [(CALL, *BYTES.encode(f'\n{{"name": "{n}", "arguments": {{}}}}\n'), END_CALL) for n in names]
    return (*(i for each in body for i in each), END)


def turns(*tokens: tuple[int, ...]) -> Script:
    """Say these, one a turn."""
    return lambda seed, turn, context: tokens[turn]


async def play(env: Echo, script: Script, rules: TurnRules, limits: Limits | None = None) -> Trajectory:
    played: list[Transition] = []
    engine: Any = ScriptedEngine(script)
    async with engine.session(group=None, seed=0) as session:
        lifted = EnvFromMessageEnv(env, TASK, RENDERER, rules=rules)
        reason = await run_episode(lifted, session, limits or Limits(500), temperature=1.0, transitions=played)
    return Trajectory(tuple(played), reason)


def added(episode: Trajectory) -> list[tuple[int, ...]]:
    """What each turn after the first was shown beyond the one before it, which it extends id for id (I1)."""
    new = []
    for before, after in zip(episode.transitions, episode.transitions[1:], strict=False):
        grown = before.observation + before.action.tokens
        assert after.observation[: len(grown)] == grown
        assert after.rewrite is None
        new.append(after.observation[len(grown) :])
    return new


def shown(*messages: Message) -> tuple[int, ...]:
    return tuple(RENDERER.extend(messages, after=RENDERER.stop))


# --- broken framing -------------------------------------------------------------------------------


async def test_I1_a_broken_turn_is_corrected_in_exactly_these_tokens() -> None:
    env, rules = Echo(turns=2), TurnRules(parse_retries=1, correction="Again.")
    episode = await play(env, turns(BROKEN, GOOD, GOOD), rules)
    assert episode.stop_reason is StopReason.TERMINATED
    assert added(episode) == [shown(Message("user", "Again.")), shown(Message("user", "go on"))]
    assert [m.content for m in env.heard] == ["yes", "yes"], "the env never hears of it"
    assert [dict(t.metrics) for t in episode.transitions] == [{"malformed": 1.0}, {"turns": 1.0}, {"turns": 1.0}]


async def test_turns_without_a_readable_call_use_up_no_corrections() -> None:
    rules = TurnRules(parse_retries=2)
    episode = await play(Echo(turns=9), turns(UNREAD, UNREAD, BROKEN, BROKEN, BROKEN), rules)
    assert (episode.stop_reason, len(episode.transitions)) == (StopReason.PARSE_FAILURE, 5)


@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_only_corrections_in_a_row_count(retries: int) -> None:
    often = [BROKEN] * retries
    script = turns(*often, GOOD, *often, GOOD, *often, BROKEN)
    episode = await play(Echo(turns=9), script, TurnRules(parse_retries=retries, failed_parse_reward=-0.75))
    assert episode.stop_reason is StopReason.PARSE_FAILURE
    assert len(episode.transitions) == 3 * retries + 3
    assert episode.reward == -0.75
    assert episode.transitions[-1].episode_done


async def test_a_correction_uses_up_a_turn() -> None:
    episode = await play(Echo(turns=2), turns(BROKEN, GOOD), TurnRules(parse_retries=5), Limits(500, max_turns=2))
    assert episode.stop_reason is StopReason.MAX_TURNS
    assert len(episode.transitions) == 2


async def test_a_turn_cut_by_its_budget_is_never_malformed() -> None:
    episode = await play(Echo(), turns((CALL, 65, 65, 65)), TurnRules(parse_retries=5, parse_penalty=1.0), Limits(3))
    assert (episode.stop_reason, episode.reward) == (StopReason.MAX_TOKENS, 0.0)


# --- calls that cannot be read --------------------------------------------------------------------


class Caller(Echo):
    """Ends the episode itself in its `patience`-th turn without a call that could be read."""

    def __init__(self, patience: int) -> None:
        super().__init__(turns=99, reward=lambda message: 1.0)
        self._patience = patience

    async def step(self, message: Message) -> MessageStepResult:
        result = await super().step(message)
        self._patience -= bool(message.malformed_calls)
        return MessageStepResult(terminated=True, reward=1.0) if self._patience <= 0 else result


@pytest.mark.parametrize(("most", "heard"), [(0, 0), (1, 1), (2, 2)])
async def test_unread_calls_are_the_envs_to_answer_up_to_a_number_in_a_row(most: int, heard: int) -> None:
    env = Echo(turns=99)
    script = turns(*[UNREAD] * most, *([GOOD] if most else []), *[UNREAD] * (most + 1))
    episode = await play(env, script, TurnRules(max_unread_turns=most, failed_parse_reward=-1.0))
    assert (episode.stop_reason, episode.reward) == (StopReason.PARSE_FAILURE, -1.0)
    assert sum(bool(m.malformed_calls) for m in env.heard) == 2 * heard
    assert set(added(episode)) <= {shown(Message("user", "go on"))}


async def test_without_a_number_the_env_decides() -> None:
    episode = await play(Caller(4), lambda *_: UNREAD, TurnRules())
    assert episode.stop_reason is StopReason.TERMINATED
    assert len(episode.transitions) == 4


async def test_one_call_that_can_be_read_makes_a_turn_well_formed() -> None:
    half = (*calls("look")[:-1], *UNREAD)
    env = Echo(turns=3)
    rules = TurnRules(max_unread_turns=0, parse_penalty=0.5, parse_retries=1, mask_malformed=True)
    episode = await play(env, lambda *_: half, rules)
    assert episode.stop_reason is StopReason.TERMINATED
    assert (episode.reward, [t.masked for t in episode.transitions]) == (0.0, [False] * 3)
    assert all(m.malformed_calls and m.tool_calls for m in env.heard)


# --- penalty and mask -----------------------------------------------------------------------------


async def test_every_malformed_turn_that_is_survived_costs_the_penalty() -> None:
    rules = TurnRules(parse_retries=2, parse_penalty=0.25, failed_parse_reward=-1.0)
    env = Echo(turns=9, reward=lambda message: 1.0)
    episode = await play(env, turns(BROKEN, UNREAD, GOOD, BROKEN, BROKEN, BROKEN), rules)
    assert [t.reward for t in episode.transitions] == [-0.25, 0.75, 1.0, -0.25, -0.25, -1.0]
    assert episode.stop_reason is StopReason.PARSE_FAILURE


async def test_an_unread_turn_on_which_the_env_ends_is_malformed_too() -> None:
    episode = await play(Caller(1), lambda *_: UNREAD, TurnRules(parse_penalty=0.25, mask_malformed=True))
    (turn,) = episode.transitions
    assert (episode.stop_reason, turn.reward, turn.masked) == (StopReason.TERMINATED, 0.75, True)


@pytest.mark.parametrize("masked", [False, True])
async def test_a_masked_turn_is_context_and_not_trained(masked: bool) -> None:
    script = turns(BROKEN, GOOD, UNREAD, GOOD)
    episode = await play(Echo(turns=3), script, TurnRules(parse_retries=1, mask_malformed=masked))
    (datum,) = trajectory_to_data(episode, 1.0, group=0, episode=0)
    whole = episode.transitions[-1].observation + episode.transitions[-1].action.tokens
    assert tuple(datum.tokens.tolist()) == whole
    trained = [GOOD, GOOD] if masked else [BROKEN, GOOD, UNREAD, GOOD]
    assert tuple(datum.tokens[datum.mask].tolist()) == sum(trained, ())
    for values in (datum.logprobs, datum.advantages):
        assert (values[~datum.mask] == 0.0).all()
        assert (values[datum.mask] != 0.0).all()
    sampled = datum.tokens[datum.versions >= 0]  # whoever is trained: it was no answer of the environment's
    assert tuple(sampled.tolist()) == sum([BROKEN, GOOD, UNREAD, GOOD], ())


async def test_an_episode_of_masked_turns_only_trains_nothing() -> None:
    rules = TurnRules(parse_retries=3, mask_malformed=True)
    episode = await play(Echo(), lambda *_: BROKEN, rules, Limits(500, max_turns=2))
    assert trajectory_to_data(episode, 1.0, group=0, episode=0) == []


# --- the number of calls --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "asked", "heard", "reason"),
    [
        (3, ["ab", "c"], ["ab", "c"], StopReason.TERMINATED),
        (3, ["ab", "cd"], ["ab", "c"], StopReason.MAX_TOOL_CALLS),
        (2, ["abc"], ["ab"], StopReason.MAX_TOOL_CALLS),
        (2, ["ab", "", "c"], ["ab", ""], StopReason.MAX_TOOL_CALLS),
        (1, ["a", "b"], ["a"], StopReason.MAX_TOOL_CALLS),
        (None, ["abcdef", "g"], ["abcdef", "g"], StopReason.TERMINATED),
    ],
)
async def test_P13_the_allowed_calls_run_and_one_more_ends_the_episode(
    most: int | None, asked: list[str], heard: list[str], reason: StopReason
) -> None:
    ends = len(asked) if reason is StopReason.TERMINATED else 99
    env = Echo(turns=ends, reward=lambda message: float(len(message.tool_calls)))
    script = turns(*(calls(*names) for names in asked))
    episode = await play(env, script, TurnRules(), Limits(500, max_tool_calls=most))
    assert ["".join(c.name for c in m.tool_calls) for m in env.heard] == heard
    assert episode.stop_reason is reason
    assert episode.reward == len("".join(heard))
    assert len(episode.transitions) == len(asked), "the turn that asked for too much is in the episode"


@pytest.mark.parametrize(
    ("most", "asked", "heard"),
    [
        (1, "?a?b?", "?a?"),
        (2, "?a?b?", "?a?b?"),
        (None, "a?", "a?"),
        (1, "??", "??"),
        (1, "ab?", "a"),
    ],
)
async def test_P13_malformed_calls_go_only_with_the_call_too_many_before_them(
    most: int | None, asked: str, heard: str
) -> None:
    env = Echo(turns=9)
    blocks = [UNREAD[:-1] if name == "?" else calls(name)[:-1] for name in asked]
    turn = (*(i for block in blocks for i in block), END)
    episode = await play(env, turns(turn), TurnRules(), Limits(500, max_turns=1, max_tool_calls=most))
    (message,) = env.heard
    assert "".join(call.name if isinstance(call, ToolCall) else "?" for call in message.calls) == heard
    assert episode.stop_reason is (StopReason.MAX_TURNS if heard == asked else StopReason.MAX_TOOL_CALLS)


# --- before a turn --------------------------------------------------------------------------------


async def test_turns_left_are_announced_after_the_reply_where_turns_are_limited() -> None:
    rules = TurnRules(before_turn=announce_turns_left)
    env = Echo(turns=9)
    episode = await play(env, lambda *_: GOOD, rules, Limits(500, max_turns=3))
    on = Message("user", "go on")
    assert added(episode) == [
        shown(on, Message("user", "2 turns left.")),
        shown(on, Message("user", "1 turn left.")),
    ]
    assert episode.transitions[0].observation == RENDERER.open([Message("user", TASK.prompt)])


async def test_a_hook_may_choose_its_turns_and_follows_a_correction_too() -> None:
    def late(left: int) -> Sequence[Message]:
        return (Message("user", "last"),) if left == 1 else ()

    rules = TurnRules(parse_retries=2, correction="Again.", before_turn=late)
    episode = await play(Echo(turns=9), turns(GOOD, BROKEN, GOOD), rules, Limits(500, max_turns=3))
    again, last = Message("user", "Again."), Message("user", "last")
    assert added(episode) == [shown(Message("user", "go on")), shown(again, last)]


async def test_without_a_limit_there_is_nothing_to_announce() -> None:
    hook: Callable[[int], Sequence[Message]] = lambda left: pytest.fail(f"asked with {left}")  # noqa: E731
    episode = await play(Echo(turns=3), lambda *_: GOOD, TurnRules(before_turn=hook))
    assert added(episode) == [shown(Message("user", "go on"))] * 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parse_retries": -1}, "parse_retries=-1: expected 0 or more"),
        ({"max_unread_turns": -1}, "max_unread_turns=-1: expected 0 or more, or None"),
        ({"parse_penalty": -0.5, "parse_retries": 1}, "parse_penalty=-0.5: expected 0 or more"),
        ({"parse_penalty": float("nan"), "parse_retries": 1}, "parse_penalty=nan"),
        ({"parse_penalty": 0.5, "max_unread_turns": 0}, "no effect when no malformed turn is survived"),
    ],
)
def test_I12_rules_that_cannot_be_meant_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TurnRules(**values)
