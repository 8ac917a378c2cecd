"""Loss forms of one token: what it costs, given its log-probs and its advantage. All losses are minimised.

A form is a pure function (tokens, *, knobs) -> (loss, clipped) over arrays of one shape, in the dtype of its inputs;
`clipped` says where a rule of the form cut the token's gradient off. Aggregation weights and the correction multiply
the loss afterwards, the KL term and the entropy bonus are added afterwards (`loss.py`); masked tokens were selected
away before. Forms that read statistics of an episode or of the batch are in `pooled.py`.

    x  logp_new       q  logp_sampler       o  logp_old, or q where the anchor is the sampler
    r = exp(x - o)    rho = exp(x - q)      p = exp(x), mu = exp(q)      A  advantage       sg  stop-gradient

A constant factor c in front of x or of a ratio gives equal gradients where the ratio is detached or differentiated:
-sg(r) A x and -r A differ in value only. So values of different forms are not comparable; their gradients are.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl.algo.tokens import TokenInputs

FormResult = tuple[jax.Array, jax.Array]
"""(loss, clipped), per token."""

sg = lax.stop_gradient


def nowhere(t: TokenInputs) -> jax.Array:
    """No token is clipped."""
    return jnp.zeros_like(t.mask)


# --- no trust region ------------------------------------------------------------------------------


def cross_entropy(t: TokenInputs) -> FormResult:
    """-x: supervised learning of the masked-in tokens, whatever their advantage.

    The aggregation is the caller's: a sum over tokens in Tinker, a mean in most trainers.
    """
    return -t.logp_new, nowhere(t)


def reinforce(t: TokenInputs) -> FormResult:
    """-A x (Williams 1992, doi 10.1007/BF00992696): right only where the sampler is the policy, or is corrected for.

    Also the policy term of GPG (Chu et al. 2025, arXiv 2504.02546), whose rescaling is in its advantage.
    """
    return -t.advantage * t.logp_new, nowhere(t)


def importance_sampling(t: TokenInputs) -> FormResult:
    """-rho A: the policy gradient corrected for the sampler's distribution, without a trust region.

    Gradient -rho A, as Tinker's loss of this name, which sums over tokens.
    """
    return -jnp.exp(t.logp_new - t.logp_sampler) * t.advantage, nowhere(t)


# --- clipped ratios -------------------------------------------------------------------------------


def clipped_surrogate(log_ratio: jax.Array, advantage: jax.Array, low: float, high: float) -> FormResult:
    """-min(r A, clip(r, low, high) A), and where the second is the smaller: there the gradient is exactly 0.

    The ratio is never evaluated where it is clipped, so that one that overflows leaves no NaN behind.
    """
    frozen = sg(jnp.exp(log_ratio))
    over, under = (advantage > 0) & (frozen > high), (advantage < 0) & (frozen < low)
    clipped = over | under
    ratio = jnp.exp(jnp.where(clipped, 0.0, log_ratio))
    return -jnp.where(over, high, jnp.where(under, low, ratio)) * advantage, clipped


def ppo(t: TokenInputs, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> FormResult:
    """-min(r A, clip(r, low, high) A) (Schulman et al. 2017, arXiv 1707.06347).

    The policy term of GRPO (arXiv 2402.03300), Dr. GRPO (2503.20783) and, with 1.28 above, of DAPO (2503.14476), which
    differ in aggregation and advantage. Thresholds are absolute ratios, as in Tinker; most code bases take offsets.
    verl adds the dual clip unless told otherwise.
    """
    return clipped_surrogate(t.log_ratio, t.advantage, clip_low_threshold, clip_high_threshold)


def dual_clip(
    t: TokenInputs,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    dual_clip_ratio: float = 3.0,
) -> FormResult:
    """PPO, and for A < 0 at most -c A with c = dual_clip_ratio (Ye et al. 2020, arXiv 1912.09729).

    So a token that became much likelier although it is bad (r > c) has no gradient. On by default in verl; TRL's
    `delta` (INTELLECT-2, arXiv 2505.07291) clamps the ratio at c before the minimum: the same value and gradient.
    """
    loss, clipped = ppo(t, clip_low_threshold=clip_low_threshold, clip_high_threshold=clip_high_threshold)
    runaway = (t.advantage < 0) & (sg(t.log_ratio) > math.log(dual_clip_ratio))
    return jnp.where(runaway, -dual_clip_ratio * t.advantage, loss), clipped | runaway


def cispo(t: TokenInputs, *, ratio_min: float = 0.0, ratio_max: float = 5.0) -> FormResult:
    """-sg(clip(r, ratio_min, ratio_max)) A x: no token is dropped, large ratios count less (arXiv 2506.13585).

    The paper gives no bound; ScaleRL (arXiv 2510.13786) finds 4, 5 and 8 alike and takes 5; Tinker takes 4 and sums.
    Elsewhere the same name hides other bounds: verl reuses PPO's 0.8 and 1.2, TRL reads epsilon_high as the cap itself
    (0.2 unless set). `clipped` is where a bound was reached, though the gradient goes on.
    """
    ratio = jnp.exp(sg(t.log_ratio))
    return -jnp.clip(ratio, ratio_min, ratio_max) * t.advantage * t.logp_new, (ratio < ratio_min) | (ratio > ratio_max)


def rollout_is(t: TokenInputs, *, ratio_min: float = 0.8, ratio_max: float = 1.2) -> FormResult:
    """-sg(r) A x inside the band (ratio_min, ratio_max), nothing outside it, whatever the sign of A (SkyRL)."""
    ratio = jnp.exp(sg(t.log_ratio))
    outside = (ratio <= ratio_min) | (ratio >= ratio_max)
    return -jnp.where(outside, 0.0, ratio) * t.advantage * t.logp_new, outside


def masked_pg(
    t: TokenInputs,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.28,
    ratio_max: float = 10.0,
) -> FormResult:
    """-sg(M min(rho, ratio_max)) A x with PPO's rule on r as the mask M (Stable-RL; MiniRL, arXiv 2512.01374).

    The weight is always against the sampler; the mask against the anchor: the sampler itself, or with anchor=old the
    policy before the batch, which is MiniRL (and collapses first in the study of DPPO, arXiv 2602.04879).
    """
    _, clipped = clipped_surrogate(sg(t.log_ratio), t.advantage, clip_low_threshold, clip_high_threshold)
    weight = jnp.minimum(jnp.exp(sg(t.logp_new - t.logp_sampler)), ratio_max)
    return -jnp.where(clipped, 0.0, weight) * t.advantage * t.logp_new, clipped


# --- trust regions in probability -----------------------------------------------------------------


def _total_variation(x: jax.Array, q: jax.Array) -> jax.Array:
    return jnp.abs(jnp.exp(x) - jnp.exp(q))


def _binary_kl(x: jax.Array, q: jax.Array) -> jax.Array:
    """KL of (mu, 1 - mu) from (p, 1 - p): the token against all others."""
    p, mu = jnp.exp(x), jnp.exp(q)
    rest = lambda z: jnp.log1p(-jnp.minimum(z, 1 - jnp.finfo(z.dtype).eps))  # noqa: E731  a certain token has no rest
    return mu * (q - x) + (1 - mu) * (rest(mu) - rest(p))


_DIVERGENCES = {"tv": _total_variation, "kl": _binary_kl}


def _moved_away(t: TokenInputs, divergence: str, low: float, high: float) -> jax.Array:
    """Where the policy is already further from the sampler than allowed, in the direction that A pushes it."""
    x, q = sg(t.logp_new), t.logp_sampler
    far = _DIVERGENCES[divergence](x, q)
    return ((t.advantage > 0) & (x > q) & (far > high)) | ((t.advantage < 0) & (x < q) & (far > low))


def kept_ratio(log_ratio: jax.Array, dropped: jax.Array) -> jax.Array:
    """exp(log_ratio), and 0 without a gradient where a token is dropped: its ratio, which may overflow, is not read."""
    return jnp.where(dropped, 0.0, jnp.exp(jnp.where(dropped, 0.0, log_ratio)))


def dppo(
    t: TokenInputs,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    divergence_low: float = 0.15,
    divergence_high: float = 0.15,
) -> FormResult:
    """-M rho A, where M drops a token once its divergence D from the sampler is too large (arXiv 2602.04879).

    M = 0 where A > 0, p > mu and D > divergence_high, or A < 0, p < mu and D > divergence_low. D is |p - mu|
    (divergence=tv; the paper takes 0.15) or the KL of "this token or another" (divergence=kl; 0.05). The anchor is the
    sampler. SkyRL and prime-rl use 0.2; verl and Stable-RL write -sg(M rho) A x, `dppo_capped`.
    """
    dropped = _moved_away(t, divergence, divergence_low, divergence_high)
    return -kept_ratio(t.logp_new - t.logp_sampler, dropped) * t.advantage, dropped


def dppo_capped(
    t: TokenInputs,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    divergence_low: float = 0.15,
    divergence_high: float = 0.15,
    ratio_max: float = 20.0,
) -> FormResult:
    """-sg(M min(rho, ratio_max)) A x: `dppo` with truncated weights (arXiv 2602.04879, eq. 23; verl, Stable-RL).

    verl's own cap of 20 is never reached there, since its actor's configuration passes 3.
    """
    dropped = _moved_away(t, divergence, divergence_low, divergence_high)
    weight = jnp.minimum(jnp.exp(sg(t.logp_new - t.logp_sampler)), ratio_max)
    return -jnp.where(dropped, 0.0, weight) * t.advantage * t.logp_new, dropped


def prime_rl(
    t: TokenInputs,
    *,
    divergence_low: float = 0.2,
    divergence_high: float = 0.2,
    advantage_tau: float = 1.0,
    sampler_kl_tau: float = 1e-3,
) -> FormResult:
    """-advantage_tau M rho A + sampler_kl_tau (x - q)^2, M as in `dppo` with total variation (prime-rl's default).

    The square has no 1/2 and acts on every trained token, dropped ones included.
    """
    dropped = _moved_away(t, "tv", divergence_low, divergence_high)
    difference = t.logp_new - t.logp_sampler
    policy = -advantage_tau * kept_ratio(difference, dropped) * t.advantage
    return policy + sampler_kl_tau * difference**2, dropped


def ipo(t: TokenInputs, *, divergence_max: float = 0.1, sampler_kl_tau: float = 1e-3) -> FormResult:
    """-M rho A + sampler_kl_tau (x - q)^2 with M = 0 where |p - mu| > divergence_max, whatever the sign (prime-rl)."""
    difference = t.logp_new - t.logp_sampler
    dropped = _total_variation(sg(t.logp_new), t.logp_sampler) > divergence_max
    return -kept_ratio(difference, dropped) * t.advantage + sampler_kl_tau * difference**2, dropped


def reverse_kl(t: TokenInputs, *, divergence_low: float = 0.2, sampler_kl_tau: float = 1e-3) -> FormResult:
    """On-policy distillation with the advantage of now: -M rho sg(f - x) + sampler_kl_tau (x - q)^2 (prime-rl).

    f is the teacher's log-prob; A is not read. M = 0 where p fell below mu by more than divergence_low. Tinker fixes
    the advantage when the token is drawn, f - q: see the variant `distillation`. The two part as soon as the policy
    moves.
    """
    assert t.logp_ref is not None
    difference = t.logp_new - t.logp_sampler
    dropped = jnp.exp(sg(t.logp_new)) - jnp.exp(t.logp_sampler) < -divergence_low
    policy = -kept_ratio(difference, dropped) * sg(t.logp_ref - t.logp_new)
    return policy + sampler_kl_tau * difference**2, dropped


# --- soft trust regions ---------------------------------------------------------------------------


def sapo(t: TokenInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> FormResult:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A (Gao et al. 2025, arXiv 2511.20347).

    Gradient -4 s (1 - s) r A: REINFORCE's at r = 1, where the value is -(2 / tau) A. A mean over sequences of means
    over tokens in the paper, TRL and verl; AReaL takes a mean over tokens.
    """
    tau = jnp.where(t.advantage > 0, tau_positive, tau_negative)
    return -(4 / tau) * jax.nn.sigmoid(tau * (jnp.exp(t.log_ratio) - 1)) * t.advantage, nowhere(t)


def dro(t: TokenInputs, *, dro_beta: float = 0.05) -> FormResult:
    """-(A x - dro_beta / 2 (x - q)^2): direct reward optimisation (Richemond et al. 2024, arXiv 2405.19107).

    No ratio in front of A; gradient -(A - dro_beta (x - q)). The square acts where A is 0 too, so the mask matters.
    The loss `dro` of Tinker and verl, and `kimi15` of ROLL with dro_beta = 0.1.
    """
    return -(t.advantage * t.logp_new - 0.5 * dro_beta * (t.logp_new - t.logp_sampler) ** 2), nowhere(t)


def drpo(t: TokenInputs, *, drpo_epsilon: float = 12.5) -> FormResult:
    """-A r + |A| exp(o) (r - 1)^2 / (2 drpo_epsilon) (AdaSPO, UniRL).

    Gradient weight 1 - sign(A (r - 1)) |p - exp(o)| / drpo_epsilon: with 12.5 it attenuates by 8 % at most.
    """
    acts = t.advantage != 0  # else an infinite ratio times 0
    ratio = jnp.exp(jnp.where(acts, t.log_ratio, 0.0))
    anchor = jnp.exp(sg(t.logp_new - t.log_ratio))
    square = jnp.abs(t.advantage) * anchor * (ratio - 1) ** 2 / (2 * drpo_epsilon)
    return jnp.where(acts, square - t.advantage * ratio, 0.0), nowhere(t)


def topr_token(t: TokenInputs, *, negative_min: float = 0.0, negative_max: float = 1.0) -> FormResult:
    """-sg(c) A x with c = 1 for A > 0, else clip(rho, negative_min, negative_max) of the token alone (ROLL, Trinity).

    The paper's ratio is that of the episode: `topr` (Le Roux et al. 2025, arXiv 2503.14286).
    """
    ratio = jnp.exp(sg(t.logp_new - t.logp_sampler))
    weight = jnp.where(t.advantage > 0, 1.0, jnp.clip(ratio, negative_min, negative_max))
    return -weight * t.advantage * t.logp_new, nowhere(t)
