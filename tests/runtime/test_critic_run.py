"""A run with a critic: asked before a step, taught once after it, kept in the checkpoint, two more programs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import forget_programs
from episodes import TALKER, talker
from small_run import small, write_model

from jaxrl.algo.advantage import CriticFit
from jaxrl.algo.critic import Critic
from jaxrl.algo.data import turn_starts
from jaxrl.algo.loss import make_loss
from jaxrl.algo.objective import Objective
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.algo.shaping import Shaping
from jaxrl.models.lora import LoraConfig
from jaxrl.runtime.checkpoint import Checkpointer, CheckpointError
from jaxrl.runtime.learner import Learner, Packing
from jaxrl.runtime.log import MetricsLog, read_metrics
from jaxrl.runtime.loop import Mode, Teaching, _Batch
from jaxrl.runtime.supply import Place, Played
from jaxrl.train import StreamMinibatchConfig, main
from jaxrl.types import Datum, Sample, StopReason, Trajectory, TrajectoryGroup, Transition

pytestmark = pytest.mark.slow

FIT = CriticFit(0.03, 16)
LORA = LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))
CRITIC = Teaching("critic", knobs={"gamma": 0.9, "lam": 0.5})


def make(critic: CriticFit | None = FIT, lora: LoraConfig | None = LORA) -> Learner:
    return Learner(
        TALKER,
        talker().params,
        lora=lora,
        objective=Objective(make_loss("ppo"), "token_mean"),
        optimizer=OptimizerConfig(1e-3),
        packing=Packing((32,), 4),
        critic=critic,
    )


def episode(
    rewards: Sequence[float], seed: int = 0, stop: StopReason = StopReason.TERMINATED, masked: Sequence[int] = ()
) -> Trajectory:
    """Turns of random bytes, each after some that are new."""
    rng = np.random.default_rng(seed)
    some = lambda n: tuple(rng.integers(0, 256, n).tolist())  # noqa: E731
    context: tuple[int, ...] = ()
    turns = []
    for i, reward in enumerate(rewards):
        context += some(3)
        action = Sample(some(2), (-5.0,) * 2, (0,) * 2, "stop")
        turns.append(Transition(context, action, reward, i == len(rewards) - 1, masked=i in masked))
        context += action.tokens
    return Trajectory(tuple(turns), stop)


def alone(trajectory: Trajectory, *, viable: bool = True) -> TrajectoryGroup:
    return TrajectoryGroup((trajectory,), (trajectory.reward,), ({},), viable=viable)


class Rehearsal:
    """Stands for a run: a real learner, whose data it notes."""

    def __init__(self, learner: Learner, teaching: Teaching = CRITIC, minibatch: int | None = None) -> None:
        self.learner, self.teaching, self.mode = learner, teaching, Mode(minibatch=minibatch)
        self.baselines: Any = {}
        self.calls: list[str] = []

    async def on_device(self, call: Any, *args: Any) -> Any:
        self.calls.append(call.__name__)
        return call(*args)


async def step(run: Any, groups: Sequence[TrajectoryGroup], order: Sequence[int] = ()) -> tuple[Any, list[Datum]]:
    """The metrics of a step on these groups, and its datums."""
    batch = _Batch(run)
    for number in order or range(len(groups)):
        await batch.add(Played(Place(number, 0, number), 0, groups[number]))
    return await batch.learn(), batch.data_D


def opinionated(learner: Learner) -> Learner:
    """Its critic says something, and something else of every context."""
    rng = np.random.default_rng(7)
    head = learner.state.critic.head.replace(weights=jnp.asarray(rng.normal(size=TALKER.width), jnp.float32))
    learner.state = replace(learner.state, critic=learner.state.critic.replace(head=head))
    return learner


def arrays(tree: Any) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(tree)]


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(arrays(a), arrays(b), strict=True))


def of_turns(d: Datum) -> list[float]:
    return [float(x) for x in d.advantages[d.mask][::2]]  # two tokens a turn


# --- the path of a value -------------------------------------------------------------------------


async def test_gae_by_hand_on_two_turns() -> None:
    learner = opinionated(make())
    group = alone(episode([0.25, 1.0]))
    v1, v2 = learner.turn_values(turn_starts([group])).values_N
    assert abs(v1 - v2) > 0.01
    run = Rehearsal(learner)
    metrics, (d,) = await step(run, [group])
    last = 1.0 - v2
    first = 0.25 + 0.9 * v2 - v1 + 0.9 * 0.5 * last
    np.testing.assert_allclose(of_turns(d), [first, last], rtol=1e-5)
    assert run.calls == ["turn_values", "update", "fit_critic"]
    assert metrics["critic/loss"] == pytest.approx((first**2 + last**2) / 2)
    assert metrics["critic/value_mean"] == pytest.approx((v1 + v2) / 2)
    targets = np.array([first + v1, last + v2])
    assert metrics["critic/explained_variance"] == pytest.approx(1 - np.var([first, last]) / targets.var())
    assert metrics["optim/tokens"] == 4


async def test_the_first_step_has_returns_for_advantages() -> None:
    learner = make()
    metrics, data = await step(
        Rehearsal(learner, Teaching("critic")), [alone(episode([0.25, 1.0])), alone(episode([]))]
    )
    np.testing.assert_allclose([of_turns(d) for d in data], [[0.25 + 0.95, 1.0]], rtol=1e-6)
    assert metrics["critic/value_mean"] == metrics["critic/explained_variance"] == 0.0
    assert (learner.turn_values(turn_starts([alone(episode([0, 0]))])).values_N > 0.1).all(), "it has learned already"


async def test_who_is_asked_about_and_taught() -> None:
    """Masked turns and episodes that are not trained count; who failed, and groups that were given up, do not."""
    groups = [
        alone(episode([0.0, 1.0], 1, masked=[0])),
        alone(episode([5.0], 2), viable=False),
        alone(episode([7.0], 3, StopReason.ENV_ERROR)),
        alone(episode([3.0], 4, StopReason.MAX_TURNS)),
    ]
    teaching = replace(CRITIC, overlong_masking=True, shaping=Shaping(clamp_on_limit=True))
    taught: list[Any] = []
    learner = make()
    fit = learner.fit_critic
    run = Rehearsal(learner, teaching)

    def fit_critic(turns: Any, targets_N: np.ndarray) -> dict[str, float]:
        taught.extend(targets_N.tolist())
        return fit(turns, targets_N)

    learner.fit_critic = fit_critic  # pyright: ignore
    _, data = await step(run, groups)
    np.testing.assert_allclose(taught, [0.45, 1.0, 0.0])
    assert [d.advantages[d.mask].tolist() for d in data] == [[1.0, 1.0]], "the rest is context, or masked as overlong"


async def test_a_step_of_nothing_teaches_nothing() -> None:
    learner = make()
    before = arrays(learner.state)
    metrics, data = await step(Rehearsal(learner), [alone(episode([1.0], 1, StopReason.TOOL_ERROR))])
    assert data == []
    assert not any(name.startswith("critic/") for name in metrics)
    assert same(before, learner.state)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1]])
async def test_a_streamed_step_asks_the_critic_of_before_and_teaches_it_once(order: list[int]) -> None:
    groups = [alone(episode([0.1 * i, 1.0 - 0.2 * i], i)) for i in range(5)]
    whole, parts = (opinionated(make()) for _ in range(2))
    want, want_D = await step(Rehearsal(whole), groups)
    run = Rehearsal(parts, minibatch=2)
    got, got_D = await step(run, groups, order)
    assert run.calls.count("fit_critic") == 1
    assert run.calls[-2:] == ["finish", "fit_critic"]
    np.testing.assert_allclose(sorted(map(of_turns, got_D)), sorted(map(of_turns, want_D)), rtol=1e-4)
    for name in ("critic/loss", "critic/value_mean", "critic/explained_variance"):
        assert got[name] == pytest.approx(want[name], rel=1e-4)
    for a, b in zip(arrays(parts.state.critic), arrays(whole.state.critic), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("adapted", [True, False], ids=["lora", "full"])
async def test_the_fit_touches_the_head_alone(adapted: bool) -> None:
    learner = make() if adapted else make(lora=None)
    turns = learner.turn_values(turn_starts([alone(episode([1.0]))]))
    before, weights = arrays(replace(learner.state, critic=None)), learner.weights
    learner.fit_critic(turns, np.array([1.0]))
    assert same(before, replace(learner.state, critic=None))
    assert (learner.weights.params, learner.weights.adapter) == (weights.params, weights.adapter), "published as it is"
    assert isinstance(learner.state.critic, Critic)
    assert float(learner.state.critic.head.bias) > 0


def test_a_learner_without_a_critic_says_so_and_one_gone_astray_stops() -> None:
    starts = turn_starts([alone(episode([1.0]))])
    with pytest.raises(RuntimeError, match="this learner has no critic"):
        make(None).turn_values(starts)
    learner = make()
    head = learner.state.critic.head.replace(bias=jnp.float32(jnp.nan))
    learner.state = replace(learner.state, critic=learner.state.critic.replace(head=head))
    with pytest.raises(FloatingPointError, match=r"step 0: the critic's values are not finite\. Lower critic_learning"):
        learner.turn_values(starts)


# --- a state that is learnable -------------------------------------------------------------------


def a_deal(rng: np.random.Generator) -> TrajectoryGroup:
    """Luck is dealt in the last token, and decides most of the reward whatever is said."""
    lucky = int(rng.integers(0, 2))
    context = (*rng.integers(0, 256, 2).tolist(), 40 + lucky)
    action = Sample(tuple(rng.integers(0, 256, 2).tolist()), (-5.0,) * 2, (0,) * 2, "stop")
    return alone(Trajectory((Transition(context, action, lucky + 0.1 * rng.normal(), True),), StopReason.TERMINATED))


async def test_where_a_state_has_a_value_its_luck_leaves_the_advantages() -> None:
    rng = np.random.default_rng(0)
    run, metrics, spread = Rehearsal(make(CriticFit(0.1, 16)), Teaching("critic")), [], []
    for _ in range(12):
        groups = [a_deal(rng) for _ in range(32)]
        measured, data = await step(run, groups)
        metrics.append(measured)
        spread.append(np.var([of_turns(d) for d in data]) / np.var([g.rewards_G for g in groups]))
    assert spread[0] == pytest.approx(1.0), "without a critic"
    assert np.mean(spread[-4:]) < 0.5
    explained = [m["critic/explained_variance"] for m in metrics]
    assert explained[0] == 0 < explained[1]
    assert np.mean(explained[-4:]) > 0.8
    assert metrics[-1]["critic/loss"] < metrics[0]["critic/loss"] / 3


# --- I10 and I11 ---------------------------------------------------------------------------------


def batch_of(number: int) -> list[TrajectoryGroup]:
    rng = np.random.default_rng(number)
    return [alone(episode(rng.normal(size=int(rng.integers(1, 4))).tolist(), 10 * number + i)) for i in range(6)]


async def test_I10_a_restored_critic_goes_on_bit_for_bit(tmp_path: Path) -> None:
    learner, metrics = make(), []
    with Checkpointer(tmp_path) as checkpoints:
        for i in range(4):
            metrics.append((await step(Rehearsal(learner), batch_of(i)))[0])
            if i == 1:
                checkpoints.save(2, learner.state)
        resumed = make()
        state, _ = checkpoints.restore(2, resumed.abstract_state())
    resumed.restore(state)
    again = [(await step(Rehearsal(resumed), batch_of(i)))[0] for i in (2, 3)]
    assert again == metrics[2:]
    assert same(resumed.state, learner.state)
    assert not same(resumed.state.critic.head, make().state.critic.head)


def test_a_checkpoint_has_a_critic_or_has_none(tmp_path: Path) -> None:
    plain, judged = make(None), make()
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, plain.state)
        state, _ = checkpoints.restore(1, plain.abstract_state())
        assert same(state, plain.state)
        with pytest.raises(CheckpointError, match=r"critic/head/bias: saved absent, expected float32\[\]"):
            checkpoints.restore(1, judged.abstract_state())
        checkpoints.save(2, judged.state)
        with pytest.raises(CheckpointError, match=r"critic/head/bias: saved float32\[\], expected absent"):
            checkpoints.restore(2, plain.abstract_state())


async def test_I11_a_critic_is_two_more_programs(tmp_path: Path) -> None:
    forget_programs()
    learner, plain = make(), make(None)
    assert learner.compilations == 0
    for i in range(3):
        await step(Rehearsal(learner), batch_of(i)[:3])
        await step(Rehearsal(plain, Teaching("reward")), batch_of(i)[:3])
    assert learner.compilations == plain.compilations + 2
    few = learner.compilations
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, learner.state)
        learner.restore(checkpoints.restore(1, learner.abstract_state())[0])
    await step(Rehearsal(learner), batch_of(5)[:3])
    bound = learner.compilations
    await step(Rehearsal(learner), batch_of(6)[:3])
    assert learner.compilations == bound <= few + 3


# --- a whole run ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


def with_critic(model: str, path: Path, **changes: Any) -> Path:
    """Four steps of groups of one: what an episode is compared with is the critic's."""
    given = {"loss_fn": "ppo", "loss_fn_config": {"advantage": "critic", "lam": 0.9}, "eval_every": 0, **changes}
    return main(small(model, path, data={"group_size": 1, "batch_size": 4, "val_tasks": ()}, **given))


def timeless(run: Path) -> list[dict[str, Any]]:
    """What a run learned from and what came of it, not how busy the machine was."""
    steps = read_metrics(run / "metrics.jsonl")
    return [{k: v for k, v in m.items() if not k.startswith(("time/", "engine/"))} for m in steps]


def test_I10_a_run_with_a_critic_is_killed_and_resumed(
    fully_optimized: None, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = with_critic(model, tmp_path / "straight")
    assert [m["data/groups_trained"] for m in timeless(straight)] == [4.0] * 4
    assert timeless(straight)[0]["critic/value_mean"] == 0 != timeless(straight)[-1]["critic/value_mean"]
    write = MetricsLog.write

    def die(self: MetricsLog, step: int, metrics: Any) -> None:
        write(self, step, metrics)
        if step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "write", die)
        with pytest.raises(KeyboardInterrupt):
            with_critic(model, tmp_path / "killed")
    resumed = with_critic(model, tmp_path / "killed", behavior_if_log_dir_exists="resume")
    assert timeless(resumed) == timeless(straight)


def test_a_streamed_run_has_a_critic_too(model: str, tmp_path: Path) -> None:
    run = with_critic(model, tmp_path / "run", stream_minibatch=StreamMinibatchConfig(2), max_steps=2, save_every=0)
    assert all("critic/loss" in m for m in timeless(run))
