"""Loss forms: masked tokens, invariances of loss x KL x aggregation, identities. Golden numbers: `test_golden.py`."""

import functools
import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algo_cases import constant_of
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.algo.aggregate import AGGREGATIONS, token_weights
from jaxrl.algo.kl import KL_LOSSES, loss_term
from jaxrl.algo.loss import LOSSES, Loss, TokenInputs, make_loss
from jaxrl.types import Datum

ROWS, WIDTH = 4, 6
EPISODES = np.array([0, 1, 1, 2])  # the second and third row are one episode, whose history was rewritten
GROUPS = np.array([0, 0, 0, 1])
COLUMNS = ("logp_new", "logp_sampler", "advantage", "logp_old", "logp_ref", "correction")


WIDE = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
KNOBS = {
    "gspo": WIDE,
    "gspo_token": WIDE,
    "sequence_ppo": {"clip_low_threshold": 0.01, "clip_high_threshold": 99.0},
    "m2po": {"second_moment_max": 0.2},
}
"""Where the published numbers would clip everything that these tests make up."""


@functools.cache
def bound(name: str, kl: str | None = None, *, old: bool = False, corrected: bool = True) -> Loss:
    """The loss with everything switched on that it may read."""
    term = None if kl is None else functools.partial(loss_term, KL_LOSSES[kl], kl_coef=0.3)
    return make_loss(name, KNOBS.get(name), anchor_old=old and LOSSES[name].anchored, corrected=corrected, kl=term)


@functools.cache
def compiled(loss: Loss) -> Any:
    def total(inputs: TokenInputs, x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(weight * loss(inputs._replace(logp_new=x)).loss)

    return jax.jit(jax.value_and_grad(total, argnums=1)), jax.jit(loss.statistics)


def value_and_grad(loss: Loss, inputs: TokenInputs, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weighted loss and its gradient with respect to x, in the dtype of the inputs."""
    value, grad = compiled(loss)[0](inputs, inputs.logp_new, jnp.asarray(weight, inputs.logp_new.dtype))
    return np.asarray(value), np.asarray(grad)


def weights_of(mask: np.ndarray, aggregation: str, episodes: np.ndarray = EPISODES) -> np.ndarray:
    """Weights of rows that are the datums of these episodes."""
    rows, n = mask.shape[0], mask.shape[1] + 1
    lead = np.concatenate([np.zeros((rows, 1), bool), mask.astype(bool)], axis=1)
    zeros, whole = np.zeros(n, np.float32), np.zeros(n, np.int32)
    data = [Datum(whole, lead[i], zeros, zeros, whole, int(GROUPS[i]), int(episodes[i])) for i in range(rows)]
    return np.stack(token_weights(data, aggregation, constant=constant_of(aggregation)))[:, 1:]


def tokens(seed: int, dtype: str = "float32", *, spread: float = 0.5) -> TokenInputs:
    """Random tokens: one advantage an episode, of either sign; masked ones among them."""
    rng = np.random.default_rng(seed)
    q = rng.normal(-2, 1, (ROWS, WIDTH))
    near = lambda: q + spread * rng.normal(size=q.shape)  # noqa: E731
    advantage = np.repeat(np.array([1.0, -0.7, 0.4])[EPISODES][:, None], WIDTH, 1)
    mask = rng.random(q.shape) < 0.7
    mask[:, 0] = True
    ids = lambda of_row: jnp.asarray(np.repeat(of_row[:, None], WIDTH, 1), jnp.int32)  # noqa: E731
    numbers = dict(zip(COLUMNS, (near(), q, advantage, near(), near(), rng.uniform(0.5, 1.5, q.shape)), strict=True))
    return TokenInputs(
        **{name: jnp.asarray(x, dtype) for name, x in numbers.items()},
        mask=jnp.asarray(mask),
        position=jnp.asarray(np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH), jnp.int32),
        episode=ids(EPISODES),
        group=ids(GROUPS),
    )


def on_policy(seed: int, dtype: str = "float32") -> TokenInputs:
    inputs = tokens(seed, dtype)
    x = inputs.logp_new
    return inputs._replace(logp_sampler=x, logp_old=x, correction=jnp.ones_like(x))


@functools.cache
def under_any_kl(name: str) -> Any:
    """value_and_grad(inputs, x, weight, of_kl): the loss with KL terms in these proportions, one program for all."""

    def total(inputs: TokenInputs, x: jax.Array, weight: jax.Array, of_kl: jax.Array) -> jax.Array:
        mixed = lambda t: sum(of_kl[i] * KL_LOSSES[kl](t) for i, kl in enumerate(KL_LOSSES))  # noqa: E731
        return jnp.sum(weight * replace(bound(name, old=True), kl=mixed)(inputs._replace(logp_new=x)).loss)

    return jax.jit(jax.value_and_grad(total, argnums=1))


@pytest.mark.parametrize("name", LOSSES)
def test_I4_poison_at_masked_tokens_changes_nothing_and_an_unmasked_batch_is_zero(name: str) -> None:
    """Under every KL and every aggregation: NaN, infinities and huge numbers, in every column at once."""
    clean = tokens(0)
    mask, run = np.asarray(clean.mask), under_any_kl(name)
    cases = itertools.product(AGGREGATIONS, np.eye(len(KL_LOSSES) + 1, dtype=np.float32)[:, 1:])  # the first is none
    for aggregation, of_kl in cases:
        weight = weights_of(mask, aggregation).astype(np.float32)
        want_value, want_grad = run(clean, clean.logp_new, weight, of_kl)
        assert (np.asarray(want_grad)[mask] != 0).any()
        for poison in (np.nan, np.inf, -np.inf, 1e30):
            dirty = clean._replace(**{c: jnp.where(clean.mask, getattr(clean, c), poison) for c in COLUMNS})
            value, grad = run(dirty, dirty.logp_new, weight, of_kl)
            np.testing.assert_array_equal(value, want_value)
            np.testing.assert_array_equal(grad, want_grad)
            assert (np.asarray(grad)[~mask] == 0).all()
        nothing = clean._replace(mask=jnp.zeros_like(clean.mask))
        value, grad = run(nothing, clean.logp_new * np.nan, np.float32(0) * weight, of_kl)
        assert value == 0
        assert (np.asarray(grad) == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_I5_order_and_split_do_not_matter(name: str) -> None:
    """Permuted rows; rows one at a time, told the statistics of the whole; and an episode as one row or as two."""
    whole, run, (_, statistics) = tokens(2), under_any_kl(name), compiled(bound(name, old=True))
    mask, pooled = np.asarray(whole.mask), statistics(whole)
    told = whole._replace(pooled=pooled)  # so that one program does for the whole and for its rows
    order = np.array([2, 0, 3, 1])
    moved = TokenInputs(*(None if x is None else x[order] for x in whole[:-1]))
    moved = moved._replace(pooled=statistics(moved))
    mixes = np.stack([np.zeros(len(KL_LOSSES)), np.eye(len(KL_LOSSES))[[*KL_LOSSES].index("k3")]]).astype(np.float32)
    for aggregation, of_kl in itertools.product(AGGREGATIONS, mixes):
        weight = weights_of(mask, aggregation).astype(np.float32)
        value, grad = run(told, whole.logp_new, weight, of_kl)

        v, g = run(moved, moved.logp_new, weight[order], of_kl)
        np.testing.assert_allclose(v, value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(g, np.asarray(grad)[order], rtol=1e-5, atol=1e-7)

        parts = []
        for row in range(ROWS):
            alone = told._replace(mask=whole.mask & (jnp.arange(ROWS) == row)[:, None])
            parts.append(run(alone, whole.logp_new, weight, of_kl))
        np.testing.assert_allclose(sum(p[0] for p in parts), value, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(sum(np.asarray(p[1]) for p in parts), grad, rtol=1e-5, atol=1e-7)


@given(seed=st.integers(0, 999), name=st.sampled_from([*LOSSES]), aggregation=st.sampled_from([*AGGREGATIONS]))
def test_I5_an_episode_may_lie_in_one_row_or_in_two(seed: int, name: str, aggregation: str) -> None:
    """Its tokens in another arrangement of rows: the same loss, and the same gradient of each token."""
    loss, split = bound(name, None, old=True), tokens(seed)
    rng = np.random.default_rng(seed)
    places = np.stack([rng.permutation(WIDTH * 2) for _ in range(1)])[0]

    def rearranged(x: jax.Array) -> jax.Array:
        """The two rows of the split episode, with their positions dealt out anew."""
        both = jnp.concatenate([x[1], x[2]])[places]
        return x.at[1].set(both[:WIDTH]).at[2].set(both[WIDTH:])

    moved = TokenInputs(*(None if x is None else rearranged(x) for x in split[:-1]))
    weight = jnp.asarray(weights_of(np.asarray(split.mask), aggregation), jnp.float32)
    value, grad = value_and_grad(loss, split, np.asarray(weight))
    v, g = value_and_grad(loss, moved, weights_of(np.asarray(moved.mask), aggregation))
    np.testing.assert_allclose(v, value, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(g, rearranged(jnp.asarray(grad)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_jit_equals_eager(name: str) -> None:
    inputs, loss = tokens(3), bound(name, "k2", old=True)
    close = lambda u, v: np.testing.assert_allclose(u, v, rtol=2e-6, atol=1e-7)  # noqa: E731
    jax.tree.map(close, loss(inputs), jax.jit(loss)(inputs))


@pytest.mark.parametrize("name", LOSSES)
def test_the_metrics_of_a_loss_are_those_it_names(name: str) -> None:
    for kl in (None, "k3"):
        loss = bound(name, kl)
        assert set(loss(tokens(3)).metrics) == set(loss.metrics)


OF_ANOTHER_KIND = {
    "cross_entropy": "it does not read advantages",
    "reverse_kl": "its advantage is the teacher's",
    "dpo": "it compares two episodes",
    "clip_cov": "it drops a token by design",
}
MADE_FOR = {"sequence_ppo": "seq_mean_token_sum", "kimi": "seq_mean_token_sum", "dpo": "prompt_mean_token_sum"}
"""Under another aggregation than theirs the values of these do not add up to what their gradients are of."""


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", [n for n in LOSSES if n not in OF_ANOTHER_KIND])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_on_policy_gradients_are_reinforce_under_their_own_aggregation(name: str, aggregation: str, old: bool) -> None:
    inputs = on_policy(4)
    weight = weights_of(np.asarray(inputs.mask), aggregation)
    _, grad = value_and_grad(bound(name, old=old), inputs, weight)
    np.testing.assert_allclose(grad, np.where(inputs.mask, -weight * inputs.advantage, 0), rtol=2e-5, atol=1e-7)
    if name not in ("sapo",):
        assert not np.asarray(bound(name, old=old)(inputs).metrics["clip_fraction"]).any()


def test_on_policy_clip_cov_drops_what_it_chooses_and_nothing_else() -> None:
    inputs = on_policy(4)
    loss = make_loss("clip_cov", {"covariance_low": 0.1})
    weight = weights_of(np.asarray(inputs.mask), "token_mean")
    _, grad = value_and_grad(loss, inputs, weight)
    chosen = np.asarray(loss.statistics(inputs)["chosen"])
    assert chosen.sum() == 1
    np.testing.assert_allclose(grad, np.where(inputs.mask & ~chosen, -weight * inputs.advantage, 0), rtol=1e-5)


DETACHED = {"cispo", "rollout_is", "masked_pg", "dppo_capped", "topr_token", "topr", "vespo"}
"""-sg(c) A x: linear in x where c is held, so the gradient times x is the value."""


@pytest.mark.parametrize("name", [n for n in LOSSES if n not in DETACHED | {"reverse_kl"}])
def test_the_gradient_is_that_of_the_value_numerically(name: str) -> None:
    """Central differences, with statistics of the batch taken anew each time: and no difference."""
    with jax.enable_x64(True):
        inputs, loss = tokens(5, "float64", spread=0.3), bound(name, old=True)
        weight = weights_of(np.asarray(inputs.mask), MADE_FOR.get(name, "seq_mean_token_mean"))
        if LOSSES[name].statistics is not None:  # the factor of an episode is one number
            inputs = inputs._replace(correction=jnp.ones_like(inputs.correction))
        _, grad = value_and_grad(loss, inputs, weight)
        step, numerical = 1e-6, np.zeros_like(grad)
        for at in np.argwhere(np.asarray(inputs.mask)):
            sides = []
            for sign in (1, -1):
                x = inputs.logp_new.at[tuple(at)].add(sign * step)
                sides.append(value_and_grad(loss, inputs._replace(logp_new=x), weight)[0])
            numerical[tuple(at)] = (sides[0] - sides[1]) / (2 * step)
    np.testing.assert_allclose(grad, numerical, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", sorted(DETACHED))
def test_a_detached_weight_is_held(name: str) -> None:
    inputs, loss = tokens(6), bound(name, old=True)
    weight = weights_of(np.asarray(inputs.mask), "token_mean")
    value, grad = value_and_grad(loss, inputs, weight)
    np.testing.assert_allclose((grad * np.asarray(inputs.logp_new)).sum(), value, rtol=1e-5)


LINEAR = [n for n in LOSSES if n not in {*OF_ANOTHER_KIND, "dro", "kimi", "prime_rl", "ipo", "kl_cov"}]


@given(seed=st.integers(0, 10_000), name=st.sampled_from(LINEAR))
def test_gradient_is_linear_in_the_advantage(seed: int, name: str) -> None:
    inputs = tokens(seed)
    weight = weights_of(np.asarray(inputs.mask), "token_sum")
    _, grad = value_and_grad(bound(name), inputs, weight)
    _, twice = value_and_grad(bound(name), inputs._replace(advantage=2 * inputs.advantage), weight)
    np.testing.assert_allclose(twice, 2 * grad, rtol=1e-5, atol=1e-6)
    _, none = value_and_grad(bound(name), inputs._replace(advantage=0 * inputs.advantage), weight)
    np.testing.assert_array_equal(none, 0)


@pytest.mark.parametrize("anchor", ["sampler", "old"])
def test_the_anchor_is_what_the_ratio_is_against(anchor: str) -> None:
    inputs = tokens(7)._replace(correction=None)
    other = inputs._replace(**{"logp_old" if anchor == "sampler" else "logp_sampler": inputs.logp_ref})
    loss = make_loss("ppo", anchor_old=anchor == "old")
    np.testing.assert_array_equal(loss(inputs).loss, loss(other).loss)
    with pytest.raises(ValueError, match="'ppo' as configured reads logp_old, which is not given"):
        make_loss("ppo", anchor_old=True)(inputs._replace(logp_old=None))


def test_a_correction_scales_the_policys_term_and_not_the_kl() -> None:
    inputs = tokens(8)
    twice = inputs._replace(correction=2 * inputs.correction)
    policy, both = (bound("ppo", kl, old=True) for kl in (None, "k3"))
    distance = both(inputs).loss - policy(inputs).loss
    np.testing.assert_allclose(both(twice).loss, 2 * policy(inputs).loss + distance, rtol=1e-5)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ppo_table_of_ratios(advantage: float) -> None:
    """Ratio to (value, coefficient), against the definition of the clipped objective."""
    ratios = np.array([0.01, 0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 3.0, 1e30, np.inf], np.float32)
    x, q = np.log(ratios), np.zeros_like(ratios)
    a, mask = np.full_like(ratios, advantage), np.ones(ratios.shape, bool)
    bare = TokenInputs(*map(jnp.asarray, (x, q, a, mask)))
    out = make_loss("ppo")(bare)
    clipped = (ratios > 1.2) if advantage > 0 else (ratios < 0.8)
    np.testing.assert_array_equal(out.metrics["clip_fraction"], clipped)
    expected = -np.minimum(ratios * advantage, np.clip(ratios, 0.8, 1.2) * advantage)
    np.testing.assert_allclose(out.loss, expected, rtol=1e-5)
    _, grad = value_and_grad(make_loss("ppo"), bare, np.ones_like(ratios))
    np.testing.assert_allclose(grad[clipped], 0)
    finite = ~clipped & np.isfinite(ratios)
    np.testing.assert_allclose(grad[finite], -ratios[finite] * advantage, rtol=1e-5)


def test_mismatch_metrics() -> None:
    x, q = jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.0])
    metrics = make_loss("importance_sampling")(TokenInputs(x, q, jnp.ones(2), jnp.array([True, True]))).metrics
    np.testing.assert_allclose(metrics["kl_sample_train_v1"], [-0.5, 1.0])
    np.testing.assert_allclose(metrics["kl_sample_train_v2"], [0.125, 0.5])
    assert "kl_sample_train_v1" not in make_loss("cross_entropy")(TokenInputs(x, q, x, jnp.array([True, True]))).metrics


def test_I12_errors_teach() -> None:
    with pytest.raises(ValueError, match="did you mean importance_sampling"):
        make_loss("importance_samplng")
    with pytest.raises(ValueError, match="nearest names are clip_high_threshold"):
        make_loss("ppo", {"clip_hi_threshold": 1.2})
    with pytest.raises(ValueError, match=r"no effect on loss 'reinforce'; it belongs to ppo, dual_clip"):
        make_loss("reinforce", {"clip_low_threshold": 0.8})
    with pytest.raises(ValueError, match=r"absolute bounds .* write 0.8 and 1.2"):
        make_loss("ppo", {"clip_low_threshold": 0.2, "clip_high_threshold": 0.2})
    with pytest.raises(ValueError, match="clip_high_threshold=nan: expected a number of at least 1"):
        make_loss("ppo", {"clip_high_threshold": float("nan")})


def test_m2po_keeps_no_tie_that_would_break_its_bound() -> None:
    x = jnp.sqrt(jnp.concatenate([jnp.zeros(1), jnp.full(99, 0.05)]))
    inputs = TokenInputs(x, jnp.zeros(100), jnp.ones(100), jnp.ones(100, bool))
    kept = make_loss("m2po").statistics(inputs)["kept"]
    assert int(kept.sum()) == 1


@pytest.mark.parametrize(("name", "config"), [("clip_cov", {"covariance_low": 0.0}), ("kl_cov", {})])
def test_tokens_are_chosen_in_the_number_asked_for_though_many_tie(name: str, config: dict) -> None:
    """A certain token has log-prob 0 exactly, so that half of a batch may have one covariance and one log-prob."""
    n = 400
    x = jnp.where(jnp.arange(n) % 2 == 0, 0.0, -1.0)
    inputs = TokenInputs(
        x, x, jnp.where(jnp.arange(n) % 2 == 0, 1.0, -1.0), jnp.ones(n, bool),
        position=jnp.arange(n, dtype=jnp.int32) % 20, episode=jnp.arange(n, dtype=jnp.int32) // 20,
    )  # fmt: skip
    shifted = inputs._replace(position=inputs.position + 1)
    loss = make_loss(name, {"covariance_share": 0.05, **config})
    chosen = np.asarray(loss.statistics(inputs)["chosen"])
    episodes_alike = 20  # each has the same tokens, so a draw takes one of them in all
    assert chosen.sum() == n * 0.05 or chosen.sum() == episodes_alike
    assert (np.asarray(loss.statistics(shifted)["chosen"]) != chosen).any(), "another draw"


def test_I5_a_draw_does_not_depend_on_how_episodes_are_numbered() -> None:
    inputs = tokens(9)
    loss = bound("clip_cov")
    renumbered = inputs._replace(episode=inputs.episode + 5)
    np.testing.assert_array_equal(*(loss.statistics(i)["chosen"] for i in (inputs, renumbered)))


@pytest.mark.parametrize("log_ratio", [-69.0, 69.0, 85.0])
@pytest.mark.parametrize("name", [n for n in LOSSES if n != "dpo"])
def test_no_ratio_makes_a_nan_of_a_token_without_advantage(name: str, log_ratio: float) -> None:
    x, zeros, ids = jnp.array([log_ratio - 70, -1.0]), jnp.zeros(2), jnp.zeros(2, jnp.int32)
    q = jnp.array([-70.0, -1.0])
    inputs = TokenInputs(
        x, q, zeros, jnp.ones(2, bool), logp_ref=q, correction=jnp.ones(2), position=ids, episode=ids, group=ids
    )
    assert not np.isnan(make_loss(name)(inputs).loss).any()
