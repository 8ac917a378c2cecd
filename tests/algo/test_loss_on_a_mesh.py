"""Every loss under every KL on eight devices: the tokens' loss and gradient are those of one device (I5)."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.algo.kl import KL_LOSSES, loss_term
from jaxrl.algo.loss import LOSSES, Loss, make_loss
from jaxrl.algo.tokens import TokenInputs
from jaxrl.models.sharding import make_mesh

pytestmark = pytest.mark.slow

ROWS, WIDTH = 16, 4
WIDE = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}
KNOBS = {"gspo": WIDE, "gspo_token": WIDE, "sequence_ppo": WIDE, "m2po": {"second_moment_max": 0.2}}


def tokens(seed: int) -> TokenInputs:
    """Ragged rows; an episode lies in one to three of them, wherever they are, so most span devices."""
    rng = np.random.default_rng(seed)
    columns = rng.normal(-2, 0.6, (5, ROWS, WIDTH)).astype(np.float32)
    episode = np.repeat(rng.integers(0, 7, (ROWS, 1)), WIDTH, 1).astype(np.int32)
    x, q, o, f, noise = columns
    return TokenInputs(
        x, q, (np.sign(noise + 2) * (1 + episode)).astype(np.float32), rng.random((ROWS, WIDTH)) < 0.7,
        logp_old=o, logp_ref=f, correction=np.abs(noise),
        position=np.broadcast_to(np.arange(WIDTH, dtype=np.int32), x.shape), episode=episode, group=episode // 2,
    )  # fmt: skip


@cache
def compiled(loss: Loss, eight: bool) -> Any:
    def total(x: jax.Array, inputs: TokenInputs) -> jax.Array:
        out = loss(inputs._replace(logp_new=x)).loss
        return jnp.sum(out * out.shape[1] / (1 + jnp.arange(out.size, dtype=out.dtype).reshape(out.shape)))

    run = jax.value_and_grad(total)
    if not eight:
        return jax.jit(run)
    rows = NamedSharding(make_mesh(4, 2, 1), PartitionSpec(("data", "fsdp"), None))
    return jax.jit(run, in_shardings=(rows, rows))


@cache
def bound(name: str, kl: str | None) -> Loss:
    term = None if kl is None else partial(loss_term, KL_LOSSES[kl], kl_coef=0.3)
    return make_loss(name, KNOBS.get(name), anchor_old=LOSSES[name].anchored, corrected=True, kl=term)


@pytest.mark.parametrize("name", LOSSES)
def test_I5_the_loss_of_a_batch_does_not_depend_on_the_devices_that_hold_it(name: str) -> None:
    for kl in (None, "k3"):
        check(bound(name, kl), seed=0)


@given(st.integers(0, 999), st.sampled_from([*LOSSES]))
@settings(max_examples=60)
def test_I5_properties_on_eight_devices(seed: int, name: str) -> None:
    check(bound(name, None), seed)


def check(loss: Loss, seed: int) -> None:
    inputs = tokens(seed)
    one, many = (compiled(loss, eight)(inputs.logp_new, inputs) for eight in (False, True))
    np.testing.assert_allclose(many[0], one[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(many[1], one[1], rtol=1e-5, atol=1e-5)
