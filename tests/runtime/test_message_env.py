"""A message-level episode as tokens: what was sampled stays id for id, and endings are told apart."""

import pickle
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from episodes import BYTES, END, ENGINE, RENDERER, TALKER, Echo, ScriptedEngine, lines, said, talker

from jaxrl.algo.data import split_reasons, trajectory_to_data
from jaxrl.chat.families import renderer_for
from jaxrl.env import MessageEnv, MessageStepResult
from jaxrl.runtime.engine import open_engine
from jaxrl.runtime.episode import Limits, run_episode
from jaxrl.runtime.message_env import EnvFromMessageEnv, MessageEnvDataset, MessageEnvGroupBuilder, TurnRules
from jaxrl.types import Message, StopReason, Task, ToolSpec, Trajectory, Transition

TASK = Task("user\nhi")
USER_LINE = BYTES.encode("user\n")
SPELLED = tuple(b"user\n")  # the same text in other ids than the tokenizer would choose


async def play(env: EnvFromMessageEnv, engine: Any, limits: Limits | None = None) -> Trajectory:
    turns: list[Transition] = []
    async with engine.session(group=None, seed=0) as session:
        reason = await run_episode(env, session, limits or Limits(100), temperature=1.0, transitions=turns)
    return Trajectory(tuple(turns), reason)


def lifted(message_env: MessageEnv, thinking: str | None = None) -> EnvFromMessageEnv:
    renderer = renderer_for(BYTES, "qwen3", thinking="strip") if thinking == "strip" else RENDERER
    return EnvFromMessageEnv(message_env, TASK, renderer, rules=TurnRules(failed_parse_reward=-0.25))


async def test_I1_ids_that_the_tokenizer_would_not_choose_stay_as_sampled() -> None:
    assert len(USER_LINE) == 1, "the canonical spelling is one id"
    engine = ScriptedEngine(lambda seed, turn, context: (*SPELLED, 65 + turn, END))
    env = Echo(turns=4)
    episode = await play(lifted(env), engine)
    (session,) = engine.sessions
    assert [message.content for message in env.heard] == [f"user\n{letter}" for letter in "ABCD"]
    for before, after in zip(episode.transitions, episode.transitions[1:], strict=False):
        grown = before.observation + before.action.tokens
        assert after.observation[: len(grown)] == grown
        assert after.rewrite is None
    (datum,) = trajectory_to_data(episode, 1.0, group=0, episode=0)
    assert datum.tokens.tolist() == session.tokens
    sampled = [t for turn in episode.transitions for t in turn.action.tokens]
    assert datum.tokens[datum.mask].tolist() == sampled
    assert tuple(sampled[:5]) == SPELLED


async def test_I1_only_what_is_new_is_given_to_the_engine() -> None:
    engine = ScriptedEngine(lines("a", "b", "c"))
    episode = await play(lifted(Echo(turns=3)), engine)
    (session,) = engine.sessions
    assert session.rewinds == []
    assert session.given[0] == episode.transitions[0].observation == RENDERER.open([Message("user", TASK.prompt)])
    assert session.given[1:] == [RENDERER.extend([Message("user", "go on")], after=RENDERER.stop)] * 2


async def test_I1_stripped_thoughts_are_a_rewrite_that_is_counted_and_rewound() -> None:
    think, end_think = (BYTES.special(t) for t in ("<think>", "</think>"))
    thought = (think, *b"\nhm\n", end_think, *b"\n\nyes", END)
    engine = ScriptedEngine(lambda seed, turn, context: thought)
    episode = await play(lifted(Echo(turns=3), "strip"), engine)
    (session,) = engine.sessions
    assert [t.rewrite for t in episode.transitions] == [None, "thinking_stripped", "thinking_stripped"]
    assert split_reasons(episode) == {"thinking_stripped": 2}
    first = episode.transitions[0].observation
    assert session.rewinds[0] == len(first), "the prompt's keys and values are kept"
    assert think not in episode.transitions[2].observation
    data = trajectory_to_data(episode, 1.0, group=0, episode=0)
    assert [d.tokens.tolist() for d in data] == [[*t.observation, *t.action.tokens] for t in episode.transitions]
    assert sum(int(d.mask.sum()) for d in data) == 3 * len(thought), "each sampled token is trained once"
    assert session.tokens == data[-1].tokens.tolist()


async def test_I1_with_a_real_engine_the_datum_is_what_the_session_held() -> None:
    held: list[tuple[int, ...]] = []
    lengths: list[int] = []
    async with open_engine(TALKER, talker(), config=ENGINE) as engine:
        for seed in range(12):
            turns: list[Transition] = []
            async with engine.session(seed=seed) as session:
                env = lifted(Echo(turns=4))
                reason = await run_episode(env, session, Limits(12), temperature=1.0, transitions=turns)
                held.append(tuple(session.tokens))
            lengths.append(len(turns))
            (datum,) = trajectory_to_data(Trajectory(tuple(turns), reason), 1.0, group=0, episode=0)
            assert tuple(datum.tokens.tolist()) == held[-1]
    assert max(lengths) == 4
    assert len(set(held)) == 12


async def test_what_is_well_framed_reaches_the_env_with_its_mistakes() -> None:
    call, end_call = (BYTES.special(t) for t in ("<tool_call>", "</tool_call>"))
    env = Echo(turns=1)
    await play(lifted(env), ScriptedEngine(lambda *_: (call, *b"not json", end_call, END)))
    (heard,) = env.heard
    assert heard.malformed_calls[0].text == "not json"


@pytest.mark.parametrize(
    ("tokens", "reason", "reward", "heard"),
    [
        (said("yes"), StopReason.TERMINATED, 2.0, 1),
        (BYTES.encode("cut"), StopReason.MAX_TOKENS, 0.0, 0),
        ((BYTES.special("<tool_call>"), 65, END), StopReason.PARSE_FAILURE, -0.25, 0),
    ],
)
async def test_endings_of_a_turn(tokens: Sequence[int], reason: StopReason, reward: float, heard: int) -> None:
    env = Echo(turns=1, reward=lambda message: 2.0)
    episode = await play(lifted(env), ScriptedEngine(lambda *_: tokens))
    assert (episode.stop_reason, episode.reward, len(env.heard)) == (reason, reward, heard)
    assert episode.transitions[-1].episode_done
    assert len(episode.transitions) == 1


async def test_a_truncation_by_the_env_is_its_own_ending() -> None:
    episode = await play(lifted(Echo(turns=2, truncate=True)), ScriptedEngine(lines("a", "b")))
    assert episode.stop_reason is StopReason.ENV
    assert [dict(t.metrics) for t in episode.transitions] == [{"turns": 1.0}] * 2


# --- what authors get wrong -----------------------------------------------------------------------


async def gives(value: Any) -> Any:
    return value


NOT_STEPPED = "expected a MessageStepResult"
NOT_OPENED = "expected a sequence of Message, at least one, such as "
SAYS_HI = Message("user", "hi")


@pytest.mark.parametrize(
    ("method", "returns", "says"),
    [
        ("step", lambda: gives(None), f"step of Echo returned None: {NOT_STEPPED}"),
        (
            "step",
            lambda: gives((SAYS_HI, 1.0)),
            f"step of Echo returned (Message(role='user', content='hi'.*{NOT_STEPPED}",
        ),
        ("step", lambda: MessageStepResult(), 'step of Echo is not async: write "async def step"'),
        ("step", lambda: None, 'step of Echo is not async: write "async def step"'),
        ("reset", lambda: [SAYS_HI], 'reset of Echo is not async: write "async def reset"'),
        ("reset", lambda: gives(None), f"reset of Echo returned None: {NOT_OPENED}"),
        ("reset", lambda: gives("hi"), f"reset of Echo returned 'hi': {NOT_OPENED}"),
        ("reset", lambda: gives([]), f"reset of Echo returned []: {NOT_OPENED}"),
        ("reset", lambda: gives(["hi"]), f"reset of Echo returned ['hi']: {NOT_OPENED}"),
        ("reset", lambda: gives({"role": "user"}), f"reset of Echo returned {{'role': 'user'}}: {NOT_OPENED}"),
        ("reset", lambda: gives(SAYS_HI), f"reset of Echo returned Message(role='user', content='hi'.*{NOT_OPENED}"),
    ],
)
async def test_a_method_that_returns_something_else_is_named(method: str, returns: Any, says: str) -> None:
    env = Echo()
    setattr(env, method, lambda given: returns())
    with pytest.raises(TypeError, match=".*".join(map(re.escape, says.split(".*")))):
        await play(lifted(env), ScriptedEngine(lines("a", "b", "c")))


async def test_a_close_that_is_not_async_is_named() -> None:
    env: Any = Echo()
    env.close = lambda: None
    with pytest.raises(TypeError, match='close of Echo is not async: write "async def close"'):
        await lifted(env).close()


async def test_tools_are_in_the_opening() -> None:
    tool = ToolSpec("look", "Look it up.", {"type": "object", "properties": {}})
    tokens, stop = await lifted(Echo(tools=(tool,))).initial_observation()
    assert tokens == RENDERER.open([Message("user", TASK.prompt)], (tool,))
    assert '"look"' in BYTES.decode(tokens)
    assert stop == RENDERER.stop


def make_echo(task: Task) -> Echo:
    return Echo()


async def make_echo_slowly(task: Task) -> Echo:
    return Echo()


@pytest.mark.parametrize("factory", [make_echo, make_echo_slowly])
async def test_I14_members_have_one_task_and_one_first_observation_each_in_an_env_of_its_own(factory) -> None:
    builder = MessageEnvGroupBuilder(TASK, factory, RENDERER, 3, tags=("echo",))
    envs: Any = await builder.make_envs()
    assert len({id(env.message_env) for env in envs}) == 3
    assert all(env.task is TASK for env in envs if isinstance(env, EnvFromMessageEnv))
    assert len({await env.initial_observation() for env in envs}) == 1
    assert [env.describe() for env in envs] == ["Echo"] * 3
    assert (builder.logging_tags(), builder.describe()) == (("echo",), TASK.prompt)


def test_a_builder_pickles() -> None:
    builder = MessageEnvGroupBuilder(TASK, make_echo, RENDERER, 3)
    again = pickle.loads(pickle.dumps(builder))
    assert (again.task, again.env_factory, again.group_size) == (TASK, make_echo, 3)
    assert again.renderer.open([Message("user", "x")]) == RENDERER.open([Message("user", "x")])


async def test_I9_when_a_member_cannot_be_made_those_before_it_are_closed() -> None:
    made: list[Echo] = []

    def factory(task: Task) -> Echo:
        if len(made) == 2:
            raise ConnectionError("no third server")
        made.append(Echo())
        return made[-1]

    with pytest.raises(ConnectionError, match="no third server"):
        await MessageEnvGroupBuilder(TASK, factory, RENDERER, 3).make_envs()
    assert [env.closed for env in made] == [1, 1]


TASKS = tuple(Task(f"task {i}") for i in range(7))


def test_a_dataset_gives_each_task_once_the_last_batch_what_is_left() -> None:
    dataset = MessageEnvDataset(TASKS, make_echo, RENDERER, batch_size=3, group_size=2, tags=("t",))
    batches = [[b.describe() for b in dataset.get_batch(i)] for i in range(len(dataset))]
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert [name for batch in batches for name in batch] == [task.prompt for task in TASKS]
    assert dataset.get_batch(0)[0].logging_tags() == ("t",)


def test_I7_a_shuffled_dataset_is_a_function_of_its_seed_and_the_index() -> None:
    def order(seed: int) -> list[str]:
        dataset = MessageEnvDataset(TASKS, make_echo, RENDERER, batch_size=2, group_size=2, shuffle_seed=seed)
        indices = np.random.default_rng().permutation(len(dataset))  # asked for in any order
        batches = {int(i): [b.describe() for b in dataset.get_batch(int(i))] for i in indices}
        return [name for i in sorted(batches) for name in batches[i]]

    assert order(1) == order(1)
    assert order(1) != order(2)
    assert sorted(order(1)) == sorted(task.prompt for task in TASKS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ()}, "tasks is empty"),
        ({"batch_size": 0}, "batch_size=0: expected at least 1"),
        ({"group_size": 0}, "group_size=0: expected at least 1"),
    ],
)
def test_wrong_datasets_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MessageEnvDataset(
            **{"tasks": TASKS, "batch_size": 1, "group_size": 1, **change}, env_factory=make_echo, renderer=RENDERER
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": "ab"}, "tasks[0]='a': expected a Task, such as Task(prompt, target=...)"),
        ({"tasks": [TASK, {"prompt": "b"}]}, "tasks[1]={'prompt': 'b'}: expected a Task"),
        ({"env_factory": make_echo(TASK)}, "such as its class; every episode gets a new env"),
        ({"env_factory": None}, "env_factory=None: expected what makes an env of a task"),
    ],
)
def test_tasks_and_factories_of_another_kind_are_refused(change: dict, message: str) -> None:
    given: Any = {"tasks": TASKS, "env_factory": make_echo, **change}
    with pytest.raises(TypeError, match=re.escape(message)):
        MessageEnvDataset(renderer=RENDERER, batch_size=1, group_size=1, **given)


@pytest.mark.parametrize(
    ("task", "factory", "message"),
    [("a", make_echo, "^task='a': expected a Task"), (TASK, make_echo(TASK), "such as its class")],
)
def test_tasks_and_factories_of_another_kind_are_refused_by_a_group(task: Any, factory: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        MessageEnvGroupBuilder(task, factory, RENDERER, 2)


async def test_a_factory_that_makes_no_env_is_named() -> None:
    def forgets(task: Task) -> Any:
        make_echo(task)

    with pytest.raises(TypeError, match=r"env_factory=.*forgets.* returned None: expected a MessageEnv"):
        await MessageEnvGroupBuilder(TASK, forgets, RENDERER, 2).make_envs()


@pytest.mark.parametrize("index", [-1, 7])
def test_a_batch_that_does_not_exist(index: int) -> None:
    dataset = MessageEnvDataset(TASKS, make_echo, RENDERER, batch_size=1, group_size=1)
    with pytest.raises(IndexError, match=f"batch {index} of a dataset of 7 batches"):
        dataset.get_batch(index)
