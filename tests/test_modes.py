"""Three ways to run: in turn, streaming, asynchronous. Whole small runs, and what they leave on disk.

What must not depend on the machine's speed is arranged by the env: `Gated` waits between its turns for the next weights
to be published, so that every asynchronous run here has groups that live through an update.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import trio
from chaos import nothing_left
from small_run import HELD_OUT, TASKS, Late, make_late, small, write_model

from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.algo.shaping import Shaping, SoftOverlong
from jaxrl.env import EnvironmentFault, MessageStepResult
from jaxrl.models import forward
from jaxrl.models.lora import LoraConfig
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.runtime.engine import Engine, EngineConfig, Weights
from jaxrl.runtime.log import MetricsLog, read_metrics
from jaxrl.runtime.message_env import TurnRules
from jaxrl.runtime.policy import policy_config
from jaxrl.runtime.record import contexts, read_records
from jaxrl.runtime.strategy import FailFast, MinViableGroup, RetryOnFailure
from jaxrl.runtime.supply import Supply
from jaxrl.train import AsyncConfig, StreamMinibatchConfig, main, one_line_errors, parse
from jaxrl.types import Message, Task

pytestmark = pytest.mark.slow

SMOOTH = OptimizerConfig(eps=1e-2)
"""Adam divides by the size of a gradient, so that of one that is all rounding makes a step of the full learning rate.
With eps far above rounding a difference d of gradients moves a parameter by at most about learning_rate / eps * d = d:
gradients here are below 1, float32 sums of them agree to about 1e-6, and so must parameters."""

ROUNDING = 2e-6

CLOCKS = ("time/", "engine/tokens_per_second", "engine/compilations", "engine/row_occupancy")
"""Metrics of this machine now; occupancy too, as a group that replaces another joins the rest when it can."""


class Flat(Late):
    """Three tasks in four teach; the others give everybody nothing, however the episode ends."""

    async def reset(self, task: Task) -> Any:
        self._flat = int(task.prompt[4:-1]) % 4 == 1
        return await super().reset(task)

    async def step(self, message: Message) -> MessageStepResult:
        result = await super().step(message)
        if not self._flat:
            return result
        return MessageStepResult(result.terminated, messages=result.messages, metrics=result.metrics)


def make_flat(task: Task) -> Flat:
    return Flat()


FLAT = {"batch_size": 4, "val_tasks": (), "env_factory": make_flat, "rules": TurnRules(failed_parse_reward=0.0)}

ADAPTED = LoraConfig(rank=2, alpha=4.0)
"""With it the members of every group differ in reward, throughout these runs."""

IN_TURN: dict[str, Any] = {"optimizer": SMOOTH, "lora": ADAPTED, "num_groups_to_log": 100}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("models") / "late")


def in_turn(model: str, path: Path, **changes: Any) -> Path:
    """A run of four steps of four groups, all recorded, two checkpoints, no evaluation."""
    data = {**FLAT, **changes.pop("data", {})}
    return main(small(model, path, **{**IN_TURN, "data": data, **changes}))


STREAMING = {"stream_minibatch": StreamMinibatchConfig(2)}
DYNAMIC = {"max_sampling_attempts": 2}
VARIANTS = {
    "in turn": {},
    "streaming": STREAMING,
    "in turn, dynamic": DYNAMIC,
    "streaming, dynamic": STREAMING | DYNAMIC,
}


@pytest.fixture(scope="module")
def finished(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that nobody interrupted."""
    folder = tmp_path_factory.mktemp("modes")
    return {name: in_turn(model, folder / name.replace(" ", "_"), **changes) for name, changes in VARIANTS.items()}


def checkpoint(run: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by its path."""
    with Checkpointer(run / "checkpoints") as checkpoints:
        meta = checkpoints._manager.item_metadata(step)["state"].tree
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), meta)
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(like))
        read = checkpoints._manager.restore(step, args=arguments)["state"]
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(read)}


def supplied(run: Path, step: int) -> dict[str, Any]:
    """What a checkpoint says of groups that were started and not trained."""
    with Checkpointer(run / "checkpoints") as checkpoints:
        return checkpoints._manager.restore(step, args=ocp.args.Composite(extra=ocp.args.JsonRestore()))["extra"]


def records(run: Path, step: int, kind: str = "step") -> list[dict[str, Any]]:
    return read_records(run / "rollouts" / f"{kind}_{step:06d}.jsonl")


def timeless(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in step.items() if not k.startswith(CLOCKS)} for step in read_metrics(run / "metrics.jsonl")]


def parameters(run: Path, step: int) -> dict[str, np.ndarray]:
    return {name: x for name, x in checkpoint(run, step).items() if "params" in name}


def assert_alike(one: Path, other: Path, step: int) -> None:
    """The same parameters within the rounding of a sum, after updates that are far above it."""
    start, a, b = parameters(one, 2), parameters(one, step), parameters(other, step)
    assert a.keys() == b.keys()
    assert len(a) > 4
    assert max(np.abs(a[name] - start[name]).max() for name in a) > 100 * ROUNDING, "something was learned"
    for name in a:
        np.testing.assert_allclose(b[name], a[name], rtol=0, atol=ROUNDING, err_msg=name)


# --- streaming is the same as in turn -------------------------------------------------------------


@pytest.mark.parametrize("dynamic", ["", ", dynamic"])
def test_streaming_gives_the_parameters_of_running_in_turn(finished: dict[str, Path], dynamic: str) -> None:
    straight, streamed = finished["in turn" + dynamic], finished["streaming" + dynamic]
    assert_alike(straight, streamed, 4)
    for step in range(4):
        for one, other in zip(records(straight, step), records(streamed, step), strict=True):
            assert one["task"] == other["task"]
            for a, b in zip(one["turns"], other["turns"], strict=True):
                assert (
                    (a["action"], a["versions"])
                    == (b["action"], b["versions"])
                    == (b["action"], [step] * len(b["action"]))
                )
                np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-4)
    for a, b in zip(timeless(straight), timeless(streamed), strict=True):
        assert a["data/datums"] == b["data/datums"]
        assert a["optim/grad_norm"] == pytest.approx(b["optim/grad_norm"], rel=1e-4)


def test_dynamic_sampling_trains_full_batches_of_the_next_groups(finished: dict[str, Path]) -> None:
    plain, dynamic = (
        read_metrics(finished["in turn"] / "metrics.jsonl"),
        read_metrics(finished["in turn, dynamic"] / "metrics.jsonl"),
    )
    assert [m["data/groups_trained"] for m in plain] == [3.0] * 4
    assert [m["data/groups_trained"] for m in dynamic] == [4.0] * 4
    assert sum(m["data/groups_replaced"] for m in dynamic) > 4
    played = [r["task"] for step in range(4) for r in records(finished["in turn, dynamic"], step) if r["member"] == 0]
    order = [t.prompt for t in TASKS] * 2
    assert played == order[: len(played)], "the data in its order, round after round"


# --- I10 ------------------------------------------------------------------------------------------


class Killed(Exception):
    """Ends a run where a power cut would have."""


def killed(run: Callable[[], Path], after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until step `after` is in the log and its checkpoint is not."""
    with monkeypatch.context() as patch:
        write = MetricsLog.write

        def die(self: MetricsLog, step: int, metrics: Mapping[str, Any]) -> None:
            write(self, step, metrics)
            if step == after:
                raise Killed

        patch.setattr(MetricsLog, "write", die)
        with pytest.raises(Killed):
            run()


def resumed(name: str, model: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    killed(partial(in_turn, model, path, **VARIANTS[name]), 2, monkeypatch)
    with Checkpointer(path / "checkpoints") as checkpoints:
        assert checkpoints.latest() == 2
    return in_turn(model, path, behavior_if_log_dir_exists="resume", **VARIANTS[name])


def test_I10_with_dynamic_sampling_a_resumed_run_is_exact(
    finished: dict[str, Path], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, run = finished["in turn, dynamic"], resumed("in turn, dynamic", model, tmp_path / "run", monkeypatch)
    assert timeless(run) == timeless(straight)
    one, other = checkpoint(straight, 4), checkpoint(run, 4)
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.tobytes() == other[name].tobytes(), name
    for file in (straight / "rollouts").iterdir():
        assert file.read_bytes() == (run / "rollouts" / file.name).read_bytes()


def test_I10_streaming_resumes_to_the_same_parameters(
    finished: dict[str, Path], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = resumed("streaming, dynamic", model, tmp_path / "run", monkeypatch)
    assert_alike(finished["streaming, dynamic"], run, 4)
    assert [m["data/datums"] for m in timeless(run)] == [
        m["data/datums"] for m in timeless(finished["streaming, dynamic"])
    ]


# --- asynchronous ---------------------------------------------------------------------------------

GROUPS, STEPS = 2, 5

KEEP = EngineConfig(**{**vars(small("", Path()).engine), "on_publish": "keep"})


class Published:
    """The weights of every version of a run, and when they came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.weights: dict[int, Weights] = {}
        self.changed = trio.Event()
        publish = Engine.publish

        async def keep(engine: Engine, weights: Weights, **options: Any) -> None:
            self.weights.setdefault(engine.version, engine.policy.weights)
            await publish(engine, weights, **options)
            self.weights[engine.version] = engine.policy.weights
            changed, self.changed = self.changed, trio.Event()
            changed.set()

        monkeypatch.setattr(Engine, "publish", keep)


class Gated(Late):
    """Of two training tasks the second waits before its second turn for the next weights."""

    def __init__(self, published: Published, diary: list[str]) -> None:
        super().__init__()
        self._published, self._diary = published, diary

    async def reset(self, task: Task) -> Any:
        self._diary.append(task.prompt)
        self._waits = task.prompt.startswith("Say") and int(task.prompt[4:-1]) % 2 == 1
        return await super().reset(task)

    async def step(self, message: Message) -> MessageStepResult:
        result = await super().step(message)
        if self._waits and not result.terminated:
            with trio.fail_after(60):  # a step in which every group agrees publishes nothing
                await self._published.changed.wait()
        return result


def asynchronous(
    model: str,
    path: Path,
    factory: Callable[[Task], Late],
    *,
    ahead: int = 1,
    in_flight: bool = True,
    on_publish: Any = "recompute",
    **changes: Any,
) -> Path:
    settings = {
        "max_steps": STEPS,
        "lora": ADAPTED,
        "num_groups_to_log": 100,
        "off_policy": AsyncConfig(ahead, GROUPS, in_flight),
        "engine": EngineConfig(**{**vars(small("", Path()).engine), "on_publish": on_publish}),
        "data": {"env_factory": factory, "val_tasks": HELD_OUT},
        **changes,
    }
    return main(small(model, path, **settings))


CHOICES = {"recompute": (True, "recompute"), "keep": (True, "keep"), "pinned": (False, "recompute")}


@pytest.fixture(scope="module")
def ahead(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Published, list[str]]]:
    """An asynchronous run for each choice of what becomes of groups under way."""
    folder, runs = tmp_path_factory.mktemp("ahead"), {}
    for name, (in_flight, on_publish) in CHOICES.items():
        with pytest.MonkeyPatch.context() as patch:
            published, diary = Published(patch), list[str]()
            factory = lambda task, p=published, d=diary: Gated(p, d)  # noqa: E731
            run = asynchronous(model, folder / name, factory, in_flight=in_flight, on_publish=on_publish)
            runs[name] = run, published, diary
    return runs


def trained_tokens(run: Path, steps: int) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """(step, episode, turn) of all training records."""
    for step in range(steps):
        for record in records(run, step):
            yield from ((step, record, turn) for turn in record["turns"])


@pytest.mark.parametrize("choice", CHOICES)
def test_I8_asynchronous_runs_end_within_the_bound_and_train_every_group_once(
    choice: str, ahead: dict[str, tuple[Path, Published, list[str]]]
) -> None:
    run, _, diary = ahead[choice]
    metrics = read_metrics(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(STEPS))
    worst = [m.get("async/staleness_max", 0.0) for m in metrics]
    assert max(worst) == 1.0, "the bound is used, and kept"
    ages = Counter(step - v for step, _, turn in trained_tokens(run, STEPS) for v in turn["versions"])
    assert set(ages) == {0, 1} if choice != "pinned" else set(ages) <= {0, 1}
    tasks = [r["task"] for step in range(STEPS) for r in records(run, step) if r["member"] == 0]
    assert sorted(tasks) == sorted(t.prompt for t in TASKS[: GROUPS * STEPS]), "each once, and none lost"
    plays = Counter(prompt for prompt in diary if prompt.startswith("Say"))
    assert plays.pop("Say 0.") == 1 + 3, "one was looked at before training"
    assert set(plays.values()) == {3}, "nobody played in vain"


@pytest.mark.parametrize("choice", CHOICES)
def test_an_evaluation_is_of_one_version(choice: str, ahead: dict[str, tuple[Path, Published, list[str]]]) -> None:
    run, _, _ = ahead[choice]
    for step in (0, 2, STEPS):
        versions = {v for r in records(run, step, "test") for turn in r["turns"] for v in turn["versions"]}
        assert versions == {step}


def worst_difference(model: str, published: Published, run: Path) -> dict[bool, float]:
    """How far recorded log-probs are from one pass under the recorded version's weights.

    By whether the context was written by other versions as well.
    """
    config = policy_config(model)

    @jax.jit
    def logprobs(weights: Weights, tokens: jax.Array, length: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[0])[None]
        live = (positions < length).astype(jnp.int32)
        hidden = forward.hidden_states(
            weights.params, weights.adapter, tokens[None], positions, live, config=config, lora_scale=2.0
        )
        return jax.nn.log_softmax(forward.logits(weights.params, hidden, config)[0])

    worst = {False: 0.0, True: 0.0}
    for step in range(STEPS):
        for record in records(run, step):
            seen: set[int] = set()
            for turn, context in zip(record["turns"], contexts(record), strict=True):
                tokens = np.zeros(64, np.int32)
                whole = (*context, *turn["action"])
                tokens[: len(whole)] = whole
                for version in set(turn["versions"]):
                    logp = logprobs(published.weights[version], jnp.asarray(tokens), jnp.int32(len(whole)))
                    for i, token in enumerate(turn["action"]):
                        if turn["versions"][i] == version:
                            seen.add(version)
                            recomputed = logp[len(context) + i - 1, token]
                            gap = abs(float(recomputed) - turn["logprobs"][i])
                            worst[len(seen) > 1] = max(worst[len(seen) > 1], gap)
    return worst


@pytest.mark.parametrize("choice", CHOICES)
def test_I15_recorded_logprobs_are_those_of_the_recorded_version(
    choice: str, model: str, ahead: dict[str, tuple[Path, Published, list[str]]]
) -> None:
    run, published, _ = ahead[choice]
    worst = worst_difference(model, published, run)
    assert worst[False] < 1e-4
    lived = [{v for t in r["turns"] for v in t["versions"]} for step in range(STEPS) for r in records(run, step)]
    if choice == "pinned":
        assert all(len(versions) == 1 for versions in lived)
        return
    assert any(len(versions) > 1 for versions in lived), "some episodes lived through an update"
    if choice == "recompute":
        assert 0 < worst[True] < 1e-4
    else:
        assert worst[True] > 1e-4, "keys of older weights were kept, as was asked for"


def test_I10_asynchronous_resume_loses_nothing_finished_and_trains_nothing_twice(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_life, second_life = list[str](), list[str]()

    class Stuck(Late):
        """One task hangs in the first life."""

        def __init__(self, diary: list[str]) -> None:
            super().__init__()
            self._diary = diary

        async def reset(self, task: Task) -> Any:
            self._diary.append(task.prompt)
            if task.prompt == "Say 5." and self._diary is first_life:
                await trio.sleep_forever()
            return await super().reset(task)

    def run(diary: list[str], **changes: Any) -> Path:
        data = {"env_factory": lambda task: Stuck(diary), "val_tasks": ()}
        return asynchronous(model, tmp_path / "run", make_late, ahead=2, data=data, eval_every=0, **changes)

    take = Supply.take

    async def patient(self: Supply, step: int) -> Any:
        """Take only when everyone has finished who can."""
        while set(self._playing) - {5}:  # noqa: ASYNC110
            await trio.sleep(0.01)
        return await take(self, step)

    save = Checkpointer.save

    def die(self: Checkpointer, *args: Any) -> None:
        save(self, *args)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Supply, "take", patient)
        patch.setattr(Checkpointer, "save", die)
        with pytest.raises(Killed):
            run(first_life)
    state = supplied(tmp_path / "run", 2)
    kept = [f["number"] for f in state["finished"]]
    assert 5 in state["unfinished"]
    assert {6, 7} <= set(kept)
    before = {r["task"] for step in range(2) for r in records(tmp_path / "run", step)}
    assert len(before) == 4
    untrained = [n for n in range(GROUPS * STEPS) if f"Say {n}." not in before]
    assert sorted([*kept, *state["unfinished"]]) == untrained
    run(second_life, behavior_if_log_dir_exists="resume")

    again = Counter(second_life)
    again["Say 0."] -= 1  # the look before training
    again += Counter()
    assert set(again) == {f"Say {n}." for n in state["unfinished"]}
    assert set(again.values()) == {3}, "what was finished was not played again"
    tasks = [r["task"] for step in range(STEPS) for r in records(tmp_path / "run", step) if r["member"] == 0]
    assert sorted(tasks) == [f"Say {n}." for n in range(GROUPS * STEPS)]
    assert max(m.get("async/staleness_max", 0.0) for m in read_metrics(tmp_path / "run" / "metrics.jsonl")) <= 2
    trained = {r["task"]: r for step in range(2, STEPS) for r in records(tmp_path / "run", step) if r["member"] == 0}
    for f in state["finished"]:
        turns = trained[f"Say {f['number']}."]["turns"]
        for turn, transition in zip(turns, f["group"]["trajectories_G"][0]["transitions"], strict=True):
            assert turn["action"] == transition["action"]["tokens"]
            assert turn["versions"] == transition["action"]["versions"]
            assert turn["logprobs"] == pytest.approx(transition["action"]["logprobs"], rel=1e-8)


def test_asynchronous_dynamic_sampling_trains_full_batches_within_the_bound(model: str, tmp_path: Path) -> None:
    data = {"env_factory": make_flat, "rules": FLAT["rules"], "val_tasks": ()}
    run = asynchronous(model, tmp_path / "run", make_flat, max_sampling_attempts=3, data=data, eval_every=0)
    metrics = read_metrics(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(STEPS))
    assert [m["data/groups_trained"] for m in metrics] == [GROUPS] * STEPS
    replaced = sum(m["data/groups_replaced"] for m in metrics)
    assert replaced >= 2, "one task in four teaches nothing"
    assert max(m["async/staleness_max"] for m in metrics) == 1.0, "the bound is used, and kept"
    played = [r["task"] for step in range(STEPS) for r in records(run, step) if r["member"] == 0]
    assert len(played) == GROUPS * STEPS + replaced
    assert len(set(played)) == len(played), "each once"
    furthest = max(int(task[4:-1]) for task in played)
    ahead = 2 * GROUPS  # started for the next step, and not needed any more
    assert furthest < len(played) + ahead, "the data in its order"


# --- executors ------------------------------------------------------------------------------------

EXECUTORS: dict[str, Callable[[], Executor]] = {
    "threads": lambda: ThreadPoolExecutor(4),
    "processes": lambda: ProcessPoolExecutor(1, get_context("spawn")),
}


@pytest.mark.parametrize(
    ("where", "reached"),
    [("threads", {"rollout_host": "0.0.0.0", "rollout_advertised": "127.0.0.1"}), ("processes", {})],
)
def test_groups_of_an_executor_are_those_played_here(
    where: str, reached: dict[str, Any], finished: dict[str, Path], model: str, tmp_path: Path
) -> None:
    config = small(model, tmp_path / "run", max_steps=1, data=FLAT, **IN_TURN)
    with EXECUTORS[where]() as executor:
        run = main(config, rollout_executor=executor, **reached)
    assert records(run, 0) == records(finished["in turn"], 0)


# --- faults ---------------------------------------------------------------------------------------


class Flaky(Late):
    """Fails in its second turn when told to. Keeps count of who was opened and closed."""

    def __init__(self, fails: Callable[[str], bool], opened: list["Flaky"], closed: list["Flaky"]) -> None:
        super().__init__()
        self._fails, self._closed = fails, closed
        opened.append(self)

    async def reset(self, task: Task) -> Any:
        self._prompt = task.prompt
        return await super().reset(task)

    async def step(self, message: Message) -> MessageStepResult:
        if len(self._messages) == 3 and self._fails(self._prompt):
            raise ConnectionError(f"no answer to {self._prompt}")
        return await super().step(message)

    async def close(self) -> None:
        self._closed.append(self)


def flaky(fails: Callable[[str], bool]) -> tuple[Callable[[Task], Flaky], list[Flaky], list[Flaky]]:
    opened, closed = list[Flaky](), list[Flaky]()
    return lambda task: Flaky(fails, opened, closed), opened, closed


def test_I9_a_fault_ends_an_asynchronous_run_with_that_error_and_nothing_left(model: str, tmp_path: Path) -> None:
    factory, opened, closed = flaky(lambda prompt: prompt == "Say 6.")
    with nothing_left(), pytest.raises(ConnectionError, match=r"no answer to Say 6\.") as caught:
        asynchronous(model, tmp_path / "run", factory, ahead=1, data={"env_factory": factory, "val_tasks": ()})
    assert any("turn 2 of Flaky" in note for note in caught.value.__notes__)
    assert any("task 'Say 6.'" in note for note in caught.value.__notes__)
    assert sorted(map(id, opened)) == sorted(map(id, closed))


def first_of_odd(asked: list[str], prompt: str) -> bool:
    """Whether this member is the first of an odd task to reach its second turn. Notes the task in `asked`."""
    asked.append(prompt)
    return asked.count(prompt) == 1 and odd(prompt)


def odd(prompt: str) -> bool:
    return int(prompt[4:-1]) % 2 == 1


def test_with_retries_a_flaky_environment_is_counted_and_the_run_goes_on(model: str, tmp_path: Path) -> None:
    asked: list[str] = []
    factory, opened, closed = flaky(partial(first_of_odd, asked))
    data = {"env_factory": factory, "val_tasks": ()}
    run = asynchronous(model, tmp_path / "run", factory, rollout_strategy=RetryOnFailure(1), data=data)
    metrics = read_metrics(run / "metrics.jsonl")
    faults = set(filter(odd, asked))  # weights of which step play depends on time: all members may end in turn one
    assert faults
    assert sum(m.get("rollout_errors/ConnectionError", 0.0) for m in metrics) == len(faults)
    assert sum(m.get("rollout_errors/groups_skipped", 0.0) for m in metrics) == 0
    tasks = [r["task"] for step in range(STEPS) for r in records(run, step) if r["trained"]]
    assert Counter(tasks) == {t.prompt: 3 for t in TASKS[: GROUPS * STEPS]}
    assert len(opened) == 3 + 3 * GROUPS * STEPS + len(faults), "the look before training, every member, every retry"
    assert sorted(map(id, opened)) == sorted(map(id, closed))


GOING_ON: dict[str, Callable[..., Path]] = {
    "streaming": partial(in_turn, max_steps=STEPS, stream_minibatch=StreamMinibatchConfig(1)),
    "asynchronous": lambda model, path, data, **options: asynchronous(
        model, path, data["env_factory"], data=data, **options
    ),
    "streaming ahead": lambda model, path, data, **options: asynchronous(
        model, path, data["env_factory"], data=data, stream_minibatch=StreamMinibatchConfig(1), **options
    ),
}


@pytest.mark.parametrize("how", GOING_ON)
def test_with_members_that_fail_every_mode_goes_on_and_trains_the_others(how: str, model: str, tmp_path: Path) -> None:
    asked: list[str] = []
    factory, opened, closed = flaky(partial(first_of_odd, asked))
    data = {"env_factory": factory, "val_tasks": (), "batch_size": GROUPS}
    run = GOING_ON[how](model, tmp_path / "run", data=data, rollout_strategy=MinViableGroup(2, max_retries=0))
    metrics = read_metrics(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(STEPS))
    faults = set(filter(odd, asked))  # weights of which step play depends on time: all members may end in turn one
    assert faults
    assert sum(m.get("rollout_errors/ConnectionError", 0.0) for m in metrics) == len(faults)
    assert sum(m.get("rollout_errors/groups_skipped", 0.0) for m in metrics) == 0
    assert max(m.get("async/staleness_max", 0.0) for m in metrics) <= (how != "streaming")
    tasks = Counter(r["task"] for step in range(STEPS) for r in records(run, step) if r["trained"])
    assert tasks == {t.prompt: 3 - (t.prompt in faults) for t in TASKS[: GROUPS * STEPS]}
    assert sorted(map(id, opened)) == sorted(map(id, closed))


@pytest.mark.parametrize("strategy", [RetryOnFailure(0), MinViableGroup(1, max_retries=1)])
def test_I13_when_everything_fails_the_run_ends_and_names_the_errors(strategy: Any, model: str, tmp_path: Path) -> None:
    opened, closed = list[Flaky](), list[Flaky]()

    class Down(Flaky):
        """Answers the look before training, and then no more."""

        async def reset(self, task: Task) -> Any:
            if len(opened) > 3:
                raise ConnectionError(f"no answer to {task.prompt}")
            return await super().reset(task)

    factory = lambda task: Down(lambda prompt: False, opened, closed)  # noqa: E731
    named = (
        r"all 4 groups of a step failed, with \d+ errors.*\n  ConnectionError: no answer to Say \d\. \(task 'Say \d\.'"
    )
    with pytest.raises(EnvironmentFault, match=named):
        in_turn(model, tmp_path / "run", rollout_strategy=strategy, data={"env_factory": factory})
    assert sorted(map(id, opened)) == sorted(map(id, closed))


# --- from the command line ------------------------------------------------------------------------

NEEDED = {"model_name": "tiny", "log_path": "nowhere", "learning_rate": 1e-3, "max_tokens": 8}


@pytest.mark.parametrize(
    ("arguments", "field", "expected"),
    [
        (
            ["rollout_strategy=MinViableGroup", "rollout_strategy.max_retries=2"],
            "rollout_strategy",
            MinViableGroup(max_retries=2),
        ),
        (["rollout_strategy=RetryOnFailure"], "rollout_strategy", RetryOnFailure(3)),
        (["rollout_strategy=FailFast"], "rollout_strategy", FailFast()),
        (
            ["off_policy=AsyncConfig", "off_policy.max_steps_off_policy=1", "off_policy.groups_per_batch=4"],
            "off_policy",
            AsyncConfig(1, 4),
        ),
        (
            [
                "off_policy.max_steps_off_policy=2",
                "off_policy.groups_per_batch=3",
                "off_policy.in_flight_updates=False",
            ],
            "off_policy",
            AsyncConfig(2, 3, in_flight_updates=False),
        ),
        (["stream_minibatch.groups_per_minibatch=2"], "stream_minibatch", StreamMinibatchConfig(2)),
        (
            ["shaping.clamp_on_limit=True", "shaping.overlong.max_tokens=20", "shaping.overlong.buffer=5"],
            "shaping",
            Shaping(clamp_on_limit=True, overlong=SoftOverlong(20, 5)),
        ),
    ],
)
def test_modes_can_be_asked_for_on_the_command_line(arguments: list[str], field: str, expected: Any) -> None:
    assert getattr(parse(arguments, **NEEDED), field) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout_strategy=MinViable"], "MinViable"),
        (["rollout_strategy=FailFast", "rollout_strategy.max_retries=2"], "max_retries"),
        (["rollout_strategy=RetryOnFailure", "rollout_strategy.max_retries=-1"], "max_retries=-1: expected 0 or more"),
        (["off_policy.max_steps_off_policy=1"], "off_policy.groups_per_batch"),
        (
            ["off_policy.max_steps_off_policy=0", "off_policy.groups_per_batch=2"],
            "off_policy.max_steps_off_policy=0: expected at least 1",
        ),
        (["stream_minibatch.groups_per_minibatch=0"], "groups_per_minibatch=0: expected at least 1"),
        (["shaping.overlong.max_tokens=5", "shaping.overlong.buffer=9"], "buffer=9: expected 1 to max_tokens=5"),
    ],
)
def test_I12_a_wrong_mode_is_refused_by_name(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit, one_line_errors():
        parse(arguments, **NEEDED)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_sampling_attempts": 0}, "max_sampling_attempts=0: expected at least 1"),
        ({"stream_minibatch": StreamMinibatchConfig(5)}, "groups_per_minibatch=5 .* 4 groups"),
        (
            {"stream_minibatch": StreamMinibatchConfig(3), "off_policy": AsyncConfig(1, 2)},
            "groups_per_minibatch=3 .* 2 groups",
        ),
        ({"off_policy": AsyncConfig(1, 7), "max_steps": 3}, "max_steps=3, but the training data has 2 times"),
        (
            {"off_policy": AsyncConfig(1, 21), "max_steps": None},
            "groups_per_batch=21, but the training data has 20 groups in all",
        ),
        ({"engine": KEEP}, "engine.on_publish='keep' has no effect"),
        ({"engine": KEEP, "off_policy": AsyncConfig(1, 2, False)}, "engine.on_publish='keep' has no effect"),
    ],
)
def test_I12_modes_that_cannot_work_are_refused_before_a_weight_is_read(
    changes: dict[str, Any], message: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxrl.train.load_policy", lambda *_, **__: pytest.fail("a weight was read"))
    with pytest.raises(ValueError, match=message):
        in_turn(model, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("executor", "changes", "message"),
    [
        (ThreadPoolExecutor(1), {"off_policy": AsyncConfig(1, 2, False)}, "in_flight_updates=False pins a group"),
        (ProcessPoolExecutor(1, get_context("fork")), {}, "forks this process"),
    ],
)
def test_I12_executors_that_cannot_work_are_refused_before_a_weight_is_read(
    executor: Executor, changes: dict[str, Any], message: str, model: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("jaxrl.train.load_policy", lambda *_, **__: pytest.fail("a weight was read"))
    with pytest.raises(ValueError, match=message):
        main(small(model, tmp_path / "run", **changes), rollout_executor=executor)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("executor", "reached", "message"),
    [
        (None, {"rollout_host": "0.0.0.0"}, "has no effect: there is no rollout_executor"),
        (ThreadPoolExecutor(1), {"rollout_host": "0.0.0.0"}, "say how clients reach this machine"),
    ],
)
def test_I12_where_workers_are_listened_for_is_checked_first(
    executor: Executor | None, reached: dict[str, Any], message: str, model: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        main(small(model, tmp_path / "run"), rollout_executor=executor, **reached)
    assert not (tmp_path / "run").exists()
