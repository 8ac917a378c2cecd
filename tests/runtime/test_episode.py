"""An episode ends where its budgets say, and tells the engine only what is new."""

from typing import Any

import pytest
from episodes import Counting, ScriptedEngine, ScriptedSession

from jaxrl.env import Env, StepResult
from jaxrl.runtime.episode import Limits, conclude, episode_seed, run_episode
from jaxrl.types import StopReason, Transition

SAY = 7  # tokens a scripted turn would like to have


async def play(env: Env, limits: Limits, capacity: int = 1000) -> tuple[StopReason, list[Transition], ScriptedSession]:
    engine: Any = ScriptedEngine(lambda seed, turn, context: range(100, 100 + SAY), capacity)
    turns: list[Transition] = []
    async with engine.session(group=None, seed=0) as session:
        reason = await run_episode(env, session, limits, temperature=1.0, transitions=turns)
        return reason, turns, session


def lengths(turns: list[Transition]) -> list[int]:
    return [len(t.action.tokens) for t in turns]


@pytest.mark.parametrize(
    ("limits", "capacity", "reason", "sampled"),
    [
        # an episode holds 3 prompt tokens, and 2 more after each of its 4 turns
        (Limits(50), 1000, StopReason.TERMINATED, [7, 7, 7, 7]),
        (Limits(5), 1000, StopReason.TERMINATED, [5, 5, 5, 5]),
        (Limits(50, max_turns=4), 1000, StopReason.TERMINATED, [7, 7, 7, 7]),
        (Limits(50, max_turns=3), 1000, StopReason.MAX_TURNS, [7, 7, 7]),
        (Limits(50, max_sampled_tokens=17), 1000, StopReason.MAX_TOKENS, [7, 7, 3]),
        (Limits(50, max_sampled_tokens=14), 1000, StopReason.MAX_TOKENS, [7, 7]),
        (Limits(50, max_episode_tokens=24), 1000, StopReason.MAX_TOKENS, [7, 7, 3]),
        (Limits(50, max_episode_tokens=21), 1000, StopReason.MAX_TOKENS, [7, 7]),
        (Limits(50, max_episode_tokens=3), 1000, StopReason.MAX_TOKENS, []),
        (Limits(50), 22, StopReason.CONTEXT_OVERFLOW, [7, 7, 1]),
        (Limits(50), 21, StopReason.CONTEXT_OVERFLOW, [7, 7]),
        (Limits(50), 3, StopReason.CONTEXT_OVERFLOW, []),
        (Limits(50), 4, StopReason.CONTEXT_OVERFLOW, [1]),
        (Limits(50, max_turns=2, max_sampled_tokens=14), 21, StopReason.MAX_TURNS, [7, 7]),
    ],
)
async def test_budgets(limits: Limits, capacity: int, reason: StopReason, sampled: list[int]) -> None:
    got, turns, session = await play(Counting(0, [], turns=4), limits, capacity)
    assert (got, lengths(turns)) == (reason, sampled)
    assert len(session.tokens) <= capacity
    assert sum(map(len, session.given)) + sum(sampled) == len(session.tokens)


async def test_a_transition_holds_the_whole_context_the_draw_and_what_the_env_said() -> None:
    _, turns, session = await play(Counting(5, [], turns=2), Limits(50))
    first, last = turns
    assert first.observation == (1, 2, 3)
    assert last.observation == (*first.observation, *first.action.tokens, 8, 9)
    assert session.tokens == [*last.observation, *last.action.tokens]
    assert (first.reward, first.episode_done, last.reward, last.episode_done) == (0.0, False, 5.0, True)
    assert session.given == [(1, 2, 3), (8, 9)]


class Rewriting(Env):
    """Shows other contexts than the one before: a changed middle, a shorter one, one it is already at."""

    def __init__(self, observations: list[tuple[int, ...]]) -> None:
        self._left = observations

    async def initial_observation(self) -> Any:
        return self._left.pop(0), ()

    async def step(self, action: Any, *, extra: Any = None) -> StepResult:
        if not self._left:
            return StepResult(1.0, True)
        return StepResult(0.0, False, self._left.pop(0), rewrite="because")


async def test_I1_a_rewritten_context_keeps_the_common_prefix_and_says_why() -> None:
    said = tuple(range(100, 100 + SAY))
    contexts = [(1, 2, 3, 4), (1, 2, 9), (1, 2, 9, *said), (5,)]
    reason, turns, session = await play(Rewriting(list(contexts)), Limits(50))
    assert reason is StopReason.TERMINATED
    assert [t.observation for t in turns] == contexts
    assert [t.rewrite for t in turns] == [None, "because", "because", "because"]
    assert session.given == [(1, 2, 3, 4), (9,), (), (5,)]
    assert session.rewinds == [2, 0]


async def test_what_was_finished_is_kept_when_the_env_fails() -> None:
    def act(where: str, member: int) -> None:
        if where == "step" and len(log) > 4:
            raise ConnectionError

    log: list[str] = []
    turns: list[Transition] = []
    env = Counting(0, log, turns=9, act=act)
    engine: Any = ScriptedEngine(lambda *_: (1,))
    async with engine.session(group=None, seed=0) as session:
        with pytest.raises(ConnectionError):
            await run_episode(env, session, Limits(5), temperature=1.0, transitions=turns)
    assert len(turns) == 3


async def played_and_concluded(env: Env) -> None:
    reason, *_ = await play(env, Limits(5, max_turns=1))
    await conclude(env, reason, Limits(5))


async def gives(value: Any) -> Any:
    return value


@pytest.mark.parametrize(
    ("method", "returns", "says"),
    [
        ("initial_observation", lambda: ((1,), ()), "initial_observation of Counting is not async: write"),
        ("step", lambda: StepResult(0.0, True), 'step of Counting is not async: write "async def step"'),
        ("step", lambda: gives(None), "step of Counting returned None: expected a StepResult"),
        ("conclude", lambda: None, 'conclude of Counting is not async: write "async def conclude"'),
        ("conclude", lambda: gives(1.0), "conclude of Counting returned 1.0: expected a Conclusion, or None"),
    ],
)
async def test_a_method_that_returns_something_else_is_named(method: str, returns: Any, says: str) -> None:
    env = Counting(0, [], turns=2)
    setattr(env, method, lambda *given, **extra: returns())
    with pytest.raises(TypeError, match=says):
        await played_and_concluded(env)


@pytest.mark.parametrize("name", ["max_tokens", "max_turns", "max_sampled_tokens", "max_episode_tokens"])
@pytest.mark.parametrize("value", [0, -3])
def test_I12_a_budget_of_nothing_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: expected at least 1, or None"):
        Limits(**{"max_tokens": 5, name: value})


def test_I7_a_seed_names_an_episode() -> None:
    identities = [
        (0, "train", 1, 2, 3),
        (0, "train", 12, 3),
        (0, "train", 1, 23),
        (0, "test", 1, 2, 3),
        (1, "train", 1, 2, 3),
    ]
    seeds = [episode_seed(*identity) for identity in identities]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [episode_seed(*identity) for identity in identities]
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(5, episode_seconds=3), "episode_seconds=3"),
        (Limits(5, sample_seconds=0.5, grader_seconds=1), "sample_seconds=0.5"),
        (Limits(5, episode_seconds=60, sample_seconds=2), "episode_seconds=60 or sample_seconds=2"),
    ],
)
def test_the_limits_that_may_have_ended_an_episode_are_named(limits: Limits, said: str) -> None:
    assert limits.say_seconds() == said
