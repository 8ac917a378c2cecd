"""The distance to a reference policy: as a term of the loss, in the advantages, or in the rewards.

In the loss: estimators of one token, pure functions (tokens, *, knobs) -> KL of the policy from the reference, over
arrays of any shape. With d = x - f, what they are worth differs between their value and their gradient (Tang & Munos
2025, arXiv 2506.09477; "Comedy of estimators", arXiv 2512.21852):

    k1 is unbiased, and its gradient has expectation 0; k2's gradient is that of the reverse KL; k3 is unbiased, and its
    gradient is that of the forward KL. k3_plus has k3's value and k2's gradient; ratio_k3 both, off-policy too.

In the advantages or the rewards nothing is differentiated and k1 is the right estimator; there the penalty is data,
added to the datums before they are packed. Knows nothing about where reference log-probs come from.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl.algo.tokens import TokenInputs
from jaxrl.types import Datum

# --- in the loss ----------------------------------------------------------------------------------


def _difference(t: TokenInputs) -> jax.Array:
    assert t.logp_ref is not None, "a KL term needs the reference's log-probs"
    return t.logp_new - t.logp_ref


def k1(t: TokenInputs) -> jax.Array:
    """d. In a loss it only adds noise, since its gradient has expectation 0 (tunix's default all the same)."""
    return _difference(t)


def k2(t: TokenInputs) -> jax.Array:
    """d^2 / 2 (joschu.net/blog/kl-approx): a biased value with the gradient of the reverse KL, on-policy."""
    return 0.5 * _difference(t) ** 2


def k3(t: TokenInputs) -> jax.Array:
    """exp(-d) + d - 1, the term of GRPO (arXiv 2402.03300). verl clamps it to +-10 and d to +-20; here nothing is."""
    d = _difference(t)
    return jnp.exp(-d) + d - 1


def k3_plus(t: TokenInputs) -> jax.Array:
    """The value of k3 with the gradient of k2 (verl); NeMo's default exp(x - sg(x)) k3 is the same in both."""
    gradient = k2(t)
    return lax.stop_gradient(k3(t)) + gradient - lax.stop_gradient(gradient)


def ratio_k3(t: TokenInputs) -> jax.Array:
    """r k3 with r = exp(x - o) differentiated: gradient r d, right off-policy too (DeepSeek-V3.2, arXiv 2512.02556)."""
    return jnp.exp(t.log_ratio) * k3(t)


def ratio_k2(t: TokenInputs) -> jax.Array:
    """sg(r) k2: the gradient of `ratio_k3` with another value. (With r differentiated the gradient would be wrong.)"""
    return jnp.exp(lax.stop_gradient(t.log_ratio)) * k2(t)


KL_LOSSES: dict[str, Callable[[TokenInputs], jax.Array]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k3_plus": k3_plus,
    "ratio_k3": ratio_k3,
    "ratio_k2": ratio_k2,
}


def loss_term(estimator: Callable[[TokenInputs], jax.Array], t: TokenInputs, *, kl_coef: float = 0.001) -> jax.Array:
    """kl_coef times the estimate: what is added to a token's loss."""
    return kl_coef * estimator(t)


# --- in the advantages and the rewards ------------------------------------------------------------


def advantage(data_D: Sequence[Datum], *, kl_coef: float = 0.01, kl_discount: float = 0.0) -> list[Datum]:
    """The datums with -kl_coef (q - f) added to the advantage of every trained token.

    With advantages of 0 and a teacher's f it is the reverse KL of on-policy distillation. kl_discount: a token also
    bears kl_discount^k of the penalty of the k-th trained token after it in its episode; 1 makes it the return to go of
    penalised rewards (verl, REINFORCE++). Tokens that are not trained are left out before the sum and after it, so that
    an observation's placeholder log-prob counts nowhere (in Tinker's cookbook it does).
    """
    return _penalised(data_D, _per_token(data_D, kl_coef), kl_discount)


def advantage_centred(data_D: Sequence[Datum], *, kl_coef: float = 0.01, kl_discount: float = 0.0) -> list[Datum]:
    """`advantage`, each penalty less the mean of the batch's, so that undiscounted they sum to zero (Tinker)."""
    penalty_D = _per_token(data_D, kl_coef)
    mean = np.concatenate(penalty_D).mean() if any(map(len, penalty_D)) else 0.0
    return _penalised(data_D, [p - mean for p in penalty_D], kl_discount)


def advantage_whitened(data_D: Sequence[Datum], *, kl_coef: float = 0.001, kl_discount: float = 1.0) -> list[Datum]:
    """Advantages less the discounted penalties to come, then whitened over the batch's trained tokens: REINFORCE++.

    With advantage=reward the returns to go of penalised rewards (Hu 2025, arXiv 2501.03262): mean and unbiased variance
    are over tokens, so long episodes weigh more, as in verl, whose 1e-8 under the root is added here too.
    """
    penalised_D = advantage(data_D, kl_coef=kl_coef, kl_discount=kl_discount)
    returns = np.concatenate([d.advantages[d.mask] for d in penalised_D]).astype(np.float64) if data_D else np.zeros(0)
    if len(returns) < 2:
        return penalised_D
    mean, scale = returns.mean(), 1 / np.sqrt(returns.var(ddof=1) + 1e-8)
    return [_with(d, (d.advantages[d.mask] - mean) * scale) for d in penalised_D]


def _per_token(data_D: Sequence[Datum], kl_coef: float) -> list[np.ndarray]:
    """kl_coef (q - f) of the trained tokens of each datum."""
    return [kl_coef * (d.logprobs - reference(d)).astype(np.float64)[d.mask] for d in data_D]


def _penalised(data_D: Sequence[Datum], penalty_D: Sequence[np.ndarray], discount: float) -> list[Datum]:
    summed_D = _future_sums(data_D, penalty_D, discount)
    return [_with(d, d.advantages[d.mask] - penalty) for d, penalty in zip(data_D, summed_D, strict=True)]


def _with(d: Datum, trained: np.ndarray) -> Datum:
    """The datum with these advantages of its trained tokens."""
    advantages = d.advantages.copy()
    advantages[d.mask] = trained.astype(np.float32)
    return replace(d, advantages=advantages)


def _future_sums(data_D: Sequence[Datum], values_D: Sequence[np.ndarray], discount: float) -> list[np.ndarray]:
    """Discounted sums from each trained token to the end of its episode, which may go on in a later datum."""
    if not discount:
        return list(values_D)
    carried: dict[tuple[int, int], float] = {}
    summed: list[np.ndarray] = []
    for d, values in zip(reversed(data_D), reversed(values_D), strict=True):
        out, total = np.empty_like(values), carried.get((d.group, d.episode), 0.0)
        for i in reversed(range(len(values))):
            total = values[i] + discount * total
            out[i] = total
        carried[d.group, d.episode] = total
        summed.append(out)
    return summed[::-1]


def reward(data_D: Sequence[Datum], *, kl_coef: float = 0.05) -> dict[tuple[int, int], float]:
    """(group, episode) -> kl_coef times the sum of q - f over its trained tokens, which its reward loses (TRL RLOO)."""
    totals: dict[tuple[int, int], float] = {}
    for d, penalty in zip(data_D, _per_token(data_D, kl_coef), strict=True):
        totals[d.group, d.episode] = totals.get((d.group, d.episode), 0.0) + float(penalty.sum())
    return totals


KL_PENALTIES: dict[str, Callable[..., list[Datum]]] = {
    "advantage": advantage,
    "advantage_centred": advantage_centred,
    "advantage_whitened": advantage_whitened,
}
"""Penalties that change advantages: (data_D, *, knobs) -> data_D."""


def reference(d: Datum) -> np.ndarray:
    """The reference's log-probs of a datum. Raises ValueError where nobody scored it."""
    if d.logprobs_ref is None:
        raise ValueError(
            f"a datum of group {d.group}, episode {d.episode} has no reference log-probs: score the batch under the "
            "reference first (Datum.logprobs_ref)"
        )
    return d.logprobs_ref
