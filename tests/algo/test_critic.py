"""The critic: what it sees of a turn, however that is packed; what its head learns; and where turns begin."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algo_cases import CHUNK, ROWS, TEMPERATURE, VOCAB, WIDTH, packed
from hypothesis import given
from hypothesis import strategies as st
from played import advantages_of, episode, flat, of_episodes

from jaxrl.algo.advantage import CriticFit
from jaxrl.algo.critic import (
    FEWEST_TURNS,
    Critic,
    Head,
    fit_metrics,
    init_critic,
    make_fit,
    make_turn_features,
    pack_turns,
    padded,
    predict,
)
from jaxrl.algo.data import TurnStarts, by_member, in_order, turn_starts
from jaxrl.algo.loss import make_loss
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.algo.scoring import Scoring
from jaxrl.algo.step import base_shardings, init_state, make_streamed_step, make_train_step, state_shardings
from jaxrl.models.config import ModelConfig
from jaxrl.models.forward import hidden_states
from jaxrl.models.lora import Adapter, LoraConfig
from jaxrl.models.sharding import make_mesh
from jaxrl.types import Datum, Sample, StopReason, Trajectory, TrajectoryGroup, Transition

OPTIMIZER = OptimizerConfig(1e-2)


def turn(observation: Sequence[int], action: Sequence[int], *, masked: bool = False) -> Transition:
    n = len(action)
    return Transition(
        tuple(observation), Sample(tuple(action), (-1.0,) * n, (0,) * n, "stop"), 0.0, False, masked=masked
    )


def one_each(*trajectories: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(trajectories, (0.0,) * len(trajectories), ({},) * len(trajectories))


def ended(*turns: Transition, reason: StopReason = StopReason.TERMINATED) -> Trajectory:
    return Trajectory(turns, reason)


def talk(rng: np.random.Generator, turns: int, *, split: bool = False) -> Trajectory:
    """Random turns that extend each other; or one whose contexts are all rewritten at their first token."""
    made: list[Transition] = []
    context: tuple[int, ...] = ()
    for _ in range(turns):
        context += tuple(rng.integers(0, VOCAB, int(rng.integers(1, 5))).tolist())
        if split:
            context = (int(rng.integers(0, VOCAB)), *context[1:])
        made.append(turn(context, tuple(rng.integers(0, VOCAB, int(rng.integers(1, 4))).tolist())))
        context += made[-1].action.tokens
    return ended(*made)


# --- where turns begin ---------------------------------------------------------------------------


def marked(starts: TurnStarts) -> list[tuple[list[int], list[int]]]:
    return [(d.tokens.tolist(), np.flatnonzero(d.mask).tolist()) for d in starts.data_D]


def test_a_mark_is_the_first_sampled_token_of_each_turn_masked_turns_included() -> None:
    talked = ended(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6], masked=True), turn([1, 2, 3, 4, 5, 6, 7], [8, 9]))
    starts = turn_starts([one_each(talked)])
    assert marked(starts) == [([1, 2, 3, 4, 5, 6, 7, 8], [2, 5, 7])], "nothing follows the last start"
    assert starts.turns == [(0, 2), (0, 5), (0, 7)]
    assert starts.counts_P_G == [[3]]


def test_a_turn_without_tokens_begins_after_its_context_all_the_same() -> None:
    last = turn_starts([one_each(ended(turn([1, 2], [3]), turn([1, 2, 3, 4], [])))])
    assert marked(last) == [([1, 2, 3, 4, 0], [2, 4])], "one token to be predicted, which nothing reads"
    again = turn_starts([one_each(ended(turn([1, 2], []), turn([1, 2], []), turn([1, 2, 5], [6])))])
    assert marked(again) == [([1, 2, 5, 6], [2, 3])]
    assert again.turns == [(0, 2), (0, 2), (0, 3)], "two turns may begin in one place"


def test_an_episode_that_splits_begins_again_and_who_does_not_count_is_left_out() -> None:
    split = ended(turn([1, 2], [3]), turn([1, 9], [4]), turn([1, 9, 4, 5], [6]))
    failed = ended(turn([1], [2]), reason=StopReason.ENV_ERROR)
    starts = turn_starts([one_each(failed, split), one_each(), one_each(ended())])
    assert marked(starts) == [([1, 2, 3], [2]), ([1, 9, 4, 5, 6], [2, 4])]
    assert starts.turns == [(0, 2), (1, 2), (1, 4)]
    assert starts.counts_P_G == [[0, 3], [], [0]]
    assert {d.episode for d in starts.data_D} == {1}


def test_an_empty_context_has_no_value() -> None:
    with pytest.raises(ValueError, match="episode 1 of group 0: a turn has an empty observation"):
        turn_starts([one_each(ended(turn([1], [2])), ended(turn([], [2])))])


@given(st.lists(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=3), max_size=3), st.randoms())
def test_by_member_and_in_order_are_inverse(shape: list[list[tuple[int, bool]]], random: Any) -> None:
    reasons = {True: StopReason.TERMINATED, False: StopReason.TOOL_ERROR}
    groups = [one_each(*(episode([1] * n, reason=reasons[counts]) for n, counts in sizes)) for sizes in shape]
    starts = turn_starts(groups)
    values = [random.random() for _ in starts.turns]
    nested = by_member(starts, values)
    assert [[len(turns) for turns in g] for g in nested] == [[n * counts for n, counts in sizes] for sizes in shape]
    assert in_order(starts, nested).tolist() == values


# --- what a turn looks like ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def features(model: ModelConfig, lora: LoraConfig) -> Any:
    return make_turn_features(Scoring(model, lora, TEMPERATURE, head_chunk=CHUNK))


@pytest.fixture(scope="module")
def dense(base: Any, adapter: Adapter) -> Any:
    """The feature of one context by itself: no packing, no batch, no split. Shapes and config of this model."""
    config = ModelConfig(96, 64, 192, 2, 2, 1, 32, 1024, tie_embeddings=True)

    @jax.jit
    def last(tokens: jax.Array, n: jax.Array) -> jax.Array:
        where = jnp.arange(tokens.shape[1])[None]
        one = jnp.ones_like(tokens)
        h = hidden_states(base, adapter, tokens, where, one, config=config, lora_scale=2.0, remat=False)[0, n]
        return h / jnp.sqrt(jnp.mean(h**2))

    def of(context: Sequence[int]) -> np.ndarray:
        line = np.zeros((1, 64), np.int32)
        line[0, : len(context)] = context
        return np.asarray(last(line, np.int32(len(context) - 1)))

    return of


def seen(features: Any, base: Any, adapter: Any, starts: TurnStarts, rows: int = ROWS, width: int = WIDTH) -> Any:
    turns = pack_turns(starts, widths=(width,), rows=rows)
    out = np.asarray(features(adapter, base, turns.batch, turns.turns_NBK))
    assert out.dtype == np.float32
    return out.reshape(-1, out.shape[-1])[turns.slots]


@pytest.fixture(scope="module")
def talks() -> list[Trajectory]:
    rng = np.random.default_rng(3)
    whole = [talk(rng, n) for n in (1, 4, 2, 3, 1, 4)]
    return [*whole, talk(rng, 3, split=True), ended(turn([5, 6, 7], []), turn([5, 6, 7, 8], [9], masked=True))]


def test_I5_a_feature_is_the_hidden_state_of_the_context_alone(
    features: Any, dense: Any, base: Any, adapter: Adapter, talks: list[Trajectory]
) -> None:
    """In any order of the batch, in rows of any width, in any number of micro-batches, and after a split."""
    for order, rows, width in ((talks, ROWS, WIDTH), (talks[::-1], 1, WIDTH), (talks[3:] + talks[:3], ROWS, 64)):
        starts = turn_starts([one_each(*order[:3]), one_each(*order[3:])])
        got = seen(features, base, adapter, starts, rows, width)
        np.testing.assert_allclose(got, [dense(turn.observation) for t in order for turn in t.transitions], atol=2e-5)
    np.testing.assert_allclose((got**2).mean(-1), 1.0, atol=1e-5)
    assert len(np.unique(got.round(4), axis=0)) == len(got), "every context looks different"


def test_what_a_turn_says_is_not_seen(features: Any, base: Any, adapter: Adapter) -> None:
    told = lambda action: ended(turn([4, 5, 6], action), turn([4, 5, 6, *action, 2], [3]))  # noqa: E731
    first, again = (seen(features, base, adapter, turn_starts([one_each(told(a))])) for a in ([7, 8], [9, 1]))
    np.testing.assert_array_equal(first[0], again[0])
    assert not np.array_equal(first[1], again[1]), "until the next turn, whose context it is"


def test_I11_a_program_for_each_power_of_two(model: ModelConfig, lora: LoraConfig, base: Any, adapter: Adapter) -> None:
    features = make_turn_features(Scoring(model, lora, TEMPERATURE, head_chunk=CHUNK))
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 5):
        seen(features, base, adapter, turn_starts([one_each(*(talk(rng, 2) for _ in range(count)))]))
    assert features._cache_size() == 1
    dull = [turn([1] * n, [1]) for n in range(1, 20)]
    seen(features, base, adapter, turn_starts([one_each(ended(*dull))]))
    assert features._cache_size() == 2, "19 turns in a row"
    fit = make_fit(CriticFit(0.1, 2))
    critic = init_critic(4)
    for count in (1, 3, FEWEST_TURNS, FEWEST_TURNS + 1, 2 * FEWEST_TURNS):
        critic = fit(critic, *padded(np.ones((count, 4)), np.ones(count)))
    assert fit._cache_size() == 2


# --- the head ------------------------------------------------------------------------------------


def test_a_new_critic_says_nothing() -> None:
    critic = init_critic(6)
    assert (predict(critic.head, np.ones((3, 6))) == 0).all()
    assert all(x.dtype in (jnp.float32, jnp.int32) for x in jax.tree.leaves(critic))


def test_a_long_fit_is_the_least_squares_solution() -> None:
    rng = np.random.default_rng(0)
    x, noise = rng.normal(size=(50, 5)), rng.normal(size=50)
    targets = x @ [1.0, -2.0, 0.5, 0.0, 3.0] + 0.7 + noise
    columns = np.concatenate([x / 5, np.ones((50, 1))], 1)
    want, *_ = np.linalg.lstsq(columns, targets, rcond=None)
    critic = make_fit(CriticFit(0.05, 8000))(init_critic(5), *padded(x, targets))
    np.testing.assert_allclose([*critic.head.weights, critic.head.bias], want, atol=2e-3)
    values = np.asarray(predict(critic.head, jnp.asarray(x, jnp.float32)))
    np.testing.assert_allclose(values, columns @ want, atol=2e-3)


def test_an_update_of_adam_moves_the_head_by_the_learning_rate() -> None:
    critic = make_fit(CriticFit(0.25, 1))(init_critic(2), *padded(np.array([[1.0, -1.0]] * 3), np.full(3, 9.0)))
    np.testing.assert_allclose(critic.head.weights, [0.25, -0.25], rtol=1e-4)
    assert float(critic.head.bias) == pytest.approx(0.25, rel=1e-4)
    assert float(predict(critic.head, jnp.array([[1.0, -1.0]]))[0]) == pytest.approx(0.5, rel=1e-4)


@given(st.integers(1, 20), st.integers(0, 100))
def test_padding_and_the_order_of_turns_teach_nothing(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, targets = rng.normal(size=(count, 3)), rng.normal(size=count)
    start = FITTED(init_critic(3), *padded(rng.normal(size=(4, 3)), rng.normal(size=4)))
    features, values, weights = padded(x, targets)
    assert weights.sum() == pytest.approx(1.0)
    assert len(values) in (8, 16, 32)
    noisy = np.where(weights[:, None] > 0, features, 99.0).astype(np.float32)
    got = FITTED(start, noisy, np.where(weights > 0, values, -99.0).astype(np.float32), weights)
    turned = FITTED(start, *padded(x[::-1], targets[::-1]))
    want = FITTED(start, features, values, weights)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), turned, want)


FITTED = make_fit(CriticFit(0.1, 3))


def test_metrics_are_of_the_values_before_the_fit() -> None:
    values, targets = np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.0, 4.0])
    assert fit_metrics(values, targets) == {
        "critic/loss": pytest.approx(5 / 3),
        "critic/value_mean": 1.0,
        "critic/explained_variance": pytest.approx(1 - (6 / 9) / 2),
    }
    assert fit_metrics(np.zeros(3), targets)["critic/explained_variance"] == 0.0
    assert "critic/explained_variance" not in fit_metrics(values, np.ones(3)), "of nothing there is no share"
    assert fit_metrics(np.zeros(0), np.zeros(0)) == {}


def test_values_that_are_learned_take_the_variance_out_of_advantages() -> None:
    """Two states, one worth 1 and one worth 0, seen through noise: the luck of the state is no credit of the turn."""
    rng = np.random.default_rng(0)
    fit, critic = make_fit(CriticFit(0.03, 4)), init_critic(8)
    looks = rng.normal(size=(2, 8))
    explained, spread = [], []
    for _ in range(25):
        states = rng.integers(0, 2, 64)
        groups = [of_episodes(episode([1], [float(s) + 0.1 * rng.normal()])) for s in states]
        starts = turn_starts(groups)
        features = looks[states] + 0.1 * rng.normal(size=(64, 8))
        values = np.asarray(predict(jax.device_get(critic.head), features))
        advantages = flat(advantages_of(groups, "critic", values_P_G=by_member(starts, values)))
        alone = flat(advantages_of(groups, "reward"))
        spread.append(advantages.var() / alone.var())
        explained.append(fit_metrics(values, alone)["critic/explained_variance"])
        critic = fit(critic, *padded(features, advantages + values))
    assert (spread[0], explained[0]) == (1.0, 0.0), "the first step has no baseline"
    assert explained[-1] > 0.8
    assert spread[-1] < 0.2
    assert np.mean(explained[:3]) < np.mean(explained[3:6]) < np.mean(explained[-5:])


# --- in the training state -----------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_a_step_hands_the_critic_on_and_takes_the_same_step_without_one(
    streamed: bool, model: ModelConfig, lora: LoraConfig, base: Any, adapter: Adapter, data_D: list[Datum]
) -> None:
    critic = FITTED(init_critic(model.width), *padded(np.ones((2, model.width)), np.ones(2)))
    kept = jax.tree.map(np.asarray, critic)
    make: Any = make_streamed_step if streamed else make_train_step
    step = make(model, lora, make_loss("ppo"), OPTIMIZER, temperature=TEMPERATURE, head_chunk=CHUNK)
    batch = packed(data_D)
    after = []
    for judge in (None, critic):
        state = init_state(OPTIMIZER, adapter, critic=judge)
        if streamed:
            sums = step.add(step.start(state), state.params, base, batch)
            state, _ = step.finish(state, sums, np.float32(1.0))
        else:
            state, _ = step(state, base, batch)
        after.append(state)
    jax.tree.map(np.testing.assert_array_equal, after[1].critic, kept)
    jax.tree.map(np.testing.assert_array_equal, replace(after[1], critic=None), after[0])


def test_a_state_without_a_critic_has_the_leaves_it_had(adapter: Adapter) -> None:
    plain, judged = init_state(OPTIMIZER, adapter), init_state(OPTIMIZER, adapter, critic=init_critic(64))
    names = lambda tree: {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)}  # noqa: E731
    assert not any("critic" in name for name in names(plain))
    assert {name for name in names(judged) - names(plain) if not name.startswith(".critic.")} == set()
    assert len(names(judged)) == len(names(plain)) + 7, "weights and bias, two moments of each, and their count"


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [True, False], ids=["lora", "full"])
def test_I5_a_mesh_sees_what_one_device_sees_and_carries_the_critic(
    adapted: bool,
    model: ModelConfig,
    lora: LoraConfig,
    base: Any,
    adapter: Adapter,
    talks: list[Trajectory],
    data_D: list[Datum],
) -> None:
    mesh, starts = make_mesh(2, 2, 2), turn_starts([one_each(*talks)])
    config, params, frozen = (lora, adapter, base) if adapted else (None, base, None)
    spread = None if frozen is None else jax.device_put(frozen, base_shardings(model, mesh))
    where = state_shardings(model, config, OPTIMIZER, mesh, critic=True)
    state = init_state(OPTIMIZER, params, critic=init_critic(model.width), shardings=where)
    alone, together = (
        make_turn_features(Scoring(model, config, TEMPERATURE, m, head_chunk=CHUNK)) for m in (None, mesh)
    )
    want = seen(alone, frozen, params, starts)
    step = make_train_step(model, config, make_loss("ppo"), OPTIMIZER, temperature=TEMPERATURE, mesh=mesh)
    fit, targets = make_fit(CriticFit(0.1, 4), mesh=mesh), np.arange(len(want)) / 10
    other = make_fit(CriticFit(0.1, 4))(init_critic(model.width), *padded(want, targets))
    got = seen(together, spread, state.params, starts)
    np.testing.assert_allclose(got, want, atol=3e-5)
    state = replace(state, critic=fit(state.critic, *padded(got, targets)))
    assert isinstance(state.critic, Critic)
    assert isinstance(state.critic.head, Head)
    state, _ = step(state, spread, packed(data_D, rows=8))
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, state, where))
    np.testing.assert_allclose(state.critic.head.weights, other.head.weights, atol=1e-3)
    seen(together, spread, state.params, starts)
    state = replace(state, critic=fit(state.critic, *padded(got, targets)))
    step(state, spread, packed(data_D, rows=8))
    assert [f._cache_size() for f in (together, fit, step)] == [1, 1, 1]
