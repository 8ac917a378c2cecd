"""Drawing a token: what becomes of logits that are no numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.sample import draw


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("strange", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_told_by_its_logprob_and_draws_an_id_of_the_vocabulary(
    strange: float, temperature: float
) -> None:
    logits_BV = np.zeros((3, 300), np.float32)
    logits_BV[1, 7], logits_BV[2] = strange, strange
    uniforms_B, temperatures_B = np.full(3, 0.999, np.float32), np.full(3, temperature, np.float32)
    token_B, logp_B = draw(jnp.asarray(logits_BV), jnp.asarray(uniforms_B), jnp.asarray(temperatures_B))
    assert np.isfinite(logp_B).tolist() == [True, False, False]
    assert ((token_B >= 0) & (token_B < 300)).all()
