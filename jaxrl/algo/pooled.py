"""Loss forms that read statistics: of the episode a token belongs to, of its group, or of the whole batch.

Such a form is two pure functions. Its statistics, (tokens, *, knobs) -> {name: array at every token}, are taken once
over the whole optimizer batch, at the parameters of now and without a gradient; the form itself then works token by
token like those of `forms.py`. The gradient is exact all the same: where a loss of an episode depends on its tokens
through a pooled value s, the form's value is that of the episode and its derivative by each x is what the chain rule
gives, written as sg(value) + sg(slope) (x - sg(x)). So an episode may be packed, split into several datums, or spread
over micro-batches and devices, and its loss does not change (I5).

`gspo_token`, `vespo` and `topr` hold the pooled value on purpose. An episode is pooled whole, also when its history was
rewritten: SkyRL's step-wise training pools by turn instead.
Notation as in `forms.py`; n is the number of trained tokens of the episode.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl.algo.forms import FormResult, clipped_surrogate, kept_ratio, nowhere, ppo, sg
from jaxrl.algo.tokens import TokenInputs, batch_mean, largest, pool_count, pool_mean, pool_sum

Statistics = dict[str, jax.Array]


def attached(value: jax.Array, slope: jax.Array, x: jax.Array) -> jax.Array:
    """`value` with the derivative `slope` by x."""
    return sg(value) + sg(slope) * (x - sg(x))


# --- the ratio of an episode ----------------------------------------------------------------------


def mean_ratio(t: TokenInputs) -> Statistics:
    """The mean log-ratio of the episode."""
    return {"log_ratio": pool_mean(t.log_ratio, t.episode, t.mask)}


def mean_ratio_and_advantage(t: TokenInputs) -> Statistics:
    """The mean log-ratio and the mean advantage of the episode."""
    return mean_ratio(t) | {"advantage": pool_mean(t.advantage, t.episode, t.mask)}


def _sequence_surrogate(t: TokenInputs, advantage: jax.Array, low: float, high: float) -> FormResult:
    """PPO's rule on the episode's ratio s, whose derivative by each x, with the mean taken outside, is s."""
    s = attached(t.pooled["log_ratio"], jnp.ones_like(t.logp_new), t.logp_new)
    return clipped_surrogate(s, advantage, low, high)


def gspo(t: TokenInputs, *, clip_low_threshold: float = 1 - 3e-4, clip_high_threshold: float = 1 + 4e-4) -> FormResult:
    """-min(s A, clip(s, low, high) A) with s = exp(mean of x - o over the episode) (Zheng et al., arXiv 2507.18071).

    A is the episode's mean advantage. Under `seq_mean_token_mean` the paper's loss: gradient -A s / (E n), or 0 for all
    tokens of an episode whose s is clipped. Under `token_mean`, as in AReaL, episodes weigh by length; under
    `seq_mean_token_sum` it is LUSPO. The thresholds are the paper's; TRL, verl, OpenRLHF, SkyRL and NeMo keep PPO's 0.8
    and 1.2 unless told otherwise, which a mean log-ratio hardly ever reaches. They are as narrow as the noise between a
    bfloat16 sampler and its trainer: where that is 0.01 a token they cut two episodes in five before the first step has
    moved anything, so anchor to the old policy there.
    """
    return _sequence_surrogate(t, t.pooled["advantage"], clip_low_threshold, clip_high_threshold)


def gspo_token(
    t: TokenInputs, *, clip_low_threshold: float = 1 - 3e-4, clip_high_threshold: float = 1 + 4e-4
) -> FormResult:
    """GSPO with each token's own advantage (arXiv 2507.18071, section 4.3): the same where A is one per episode."""
    return _sequence_surrogate(t, t.advantage, clip_low_threshold, clip_high_threshold)


def sum_ratio(t: TokenInputs) -> Statistics:
    """The summed log-ratio of the episode, its mean advantage, and n."""
    return {
        "log_ratio": pool_sum(t.log_ratio, t.episode, t.mask),
        "advantage": pool_mean(t.advantage, t.episode, t.mask),
        "tokens": pool_count(t.episode, t.mask, t.logp_new.dtype),
    }


def sequence_ppo(t: TokenInputs, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2) -> FormResult:
    """-min(s A, clip(s, low, high) A) with s = exp(SUM of x - o): TRL's RLOOTrainer (arXiv 2402.14740).

    The episode is one action. For `seq_mean_token_sum`: the tokens of an episode share its value, 1/n each, and have
    the gradient -A s. A product of ratios leaves the clip range the sooner, the longer the episode.
    """
    loss, clipped = clipped_surrogate(
        t.pooled["log_ratio"], t.pooled["advantage"], clip_low_threshold, clip_high_threshold
    )
    slope = jnp.where(clipped, 0.0, loss)  # d(-s A) / d log s = -s A
    return attached(loss / t.pooled["tokens"], slope, t.logp_new), clipped


def clipped_mean(t: TokenInputs, *, clip_log_low: float = 0.4, clip_log_high: float = 0.4) -> Statistics:
    """The episode's mean advantage, and the mean of its log-ratios, clipped."""
    advantage = pool_mean(t.advantage, t.episode, t.mask)
    clipped, _ = _log_clipped(t.log_ratio, advantage, clip_log_low, clip_log_high)
    return {"log_ratio": pool_mean(clipped, t.episode, t.mask), "advantage": advantage}


def _log_clipped(z: jax.Array, advantage: jax.Array, low: float, high: float) -> tuple[jax.Array, jax.Array]:
    """(the log-ratio, bounded in the direction A pushes it; where it was)."""
    over, under = (advantage > 0) & (z > high), (advantage < 0) & (z < -low)
    return jnp.where(over, high, jnp.where(under, -low, z)), over | under


def gmpo(t: TokenInputs, *, clip_log_low: float = 0.4, clip_log_high: float = 0.4) -> FormResult:
    """-A exp(mean of z over the episode), z = x - o clipped token by token in log space (arXiv 2507.20673).

    z = min(x - o, clip_log_high) where A > 0, max(x - o, -clip_log_low) where A < 0, with A the episode's mean. For
    `seq_mean_token_mean`. The paper and TRL take 0.4; verl reuses PPO's clip ratio of 0.2.
    """
    advantage = t.pooled["advantage"]
    _, clipped = _log_clipped(t.log_ratio, advantage, clip_log_low, clip_log_high)
    value = -advantage * jnp.exp(t.pooled["log_ratio"])
    return attached(value, jnp.where(clipped, 0.0, value), t.logp_new), clipped


def vespo(
    t: TokenInputs,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> FormResult:
    """-sg(exp(lambda + k log W - lambda W)) A x, W = exp(sum of x - o over the episode) (TRL; arXiv 2602.10693).

    log W is clamped to [-18.4, 20]. The weight is 1 at W = 1 and falls off on both sides. A mean over tokens in TRL.
    """
    log_w = jnp.clip(t.pooled["log_ratio"], -18.4, 20.0)
    k = jnp.where(t.advantage >= 0, k_positive, k_negative)
    scale = jnp.where(t.advantage >= 0, lambda_positive, lambda_negative)
    weight = jnp.exp(scale + k * log_w - scale * jnp.exp(log_w))
    return -sg(weight) * t.advantage * t.logp_new, nowhere(t)


# --- the episode against the sampler --------------------------------------------------------------


def sampler_ratio(t: TokenInputs) -> Statistics:
    """Sum and mean over the episode of x - q."""
    difference = t.logp_new - t.logp_sampler
    return {
        "sampler_sum": pool_sum(difference, t.episode, t.mask),
        "sampler_mean": pool_mean(difference, t.episode, t.mask),
    }


def topr(
    t: TokenInputs,
    *,
    episode_ratio: Literal["product", "geometric"] = "product",
    negative_min: float = 0.0,
    negative_max: float = 1.0,
) -> FormResult:
    """-sg(c) A x with c = 1 for A > 0, else clip(s, negative_min, negative_max) (Le Roux et al., arXiv 2503.14286).

    s is the product of the episode's ratios rho (the paper), or their geometric mean (verl's documentation). The paper
    has rewards of 1 and -1 and no baseline.
    """
    s = jnp.exp(t.pooled["sampler_sum" if episode_ratio == "product" else "sampler_mean"])
    weight = jnp.where(t.advantage > 0, 1.0, jnp.clip(s, negative_min, negative_max))
    return -sg(weight) * t.advantage * t.logp_new, nowhere(t)


def kimi(t: TokenInputs, *, kimi_tau: float = 0.1) -> FormResult:
    """-(A X - kimi_tau / 2 (X - Q)^2), X and Q the episode's sums of x and q (Kimi k1.5, arXiv 2501.12599).

    For `seq_mean_token_sum`. `dro` squares token by token instead, and so does ROLL's loss of this name.
    """
    difference, total = t.logp_new - t.logp_sampler, sg(t.pooled["sampler_sum"])
    square = attached(0.5 * difference * total, total, t.logp_new)  # the tokens' values sum to total^2 / 2
    return kimi_tau * square - t.advantage * t.logp_new, nowhere(t)


def opsm(
    t: TokenInputs,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    opsm_delta: float = 0.1,
) -> FormResult:
    """PPO without the episodes that went wrong and stale: A < 0 and mean of q - x above opsm_delta (DeepSeek-V3.2).

    Off-policy sequence masking, arXiv 2512.02556. They stay in the denominators. TRL compares with q where it is
    recorded, slime with o.
    """
    loss, clipped = ppo(t, clip_low_threshold=clip_low_threshold, clip_high_threshold=clip_high_threshold)
    stale = (t.advantage < 0) & (-t.pooled["sampler_mean"] > opsm_delta)
    return jnp.where(stale, 0.0, loss), clipped | stale


# --- tokens chosen over the whole batch -----------------------------------------------------------


def second_moment(t: TokenInputs, *, second_moment_max: float = 0.04) -> Statistics:
    """Which tokens stay when those with the largest (x - o)^2 leave until the mean of the rest is within the bound."""
    square = t.log_ratio**2
    ordered = jnp.sort(jnp.where(t.mask, square, jnp.inf).ravel())
    means = jnp.cumsum(ordered) / jnp.arange(1, ordered.size + 1, dtype=ordered.dtype)
    fitting = (means <= second_moment_max).sum()  # the means ascend
    first_out = jnp.where(fitting < ordered.size, ordered[jnp.minimum(fitting, ordered.size - 1)], jnp.inf)
    return {"kept": square < first_out}  # all that tie with the first that does not fit leave


def m2po(t: TokenInputs, *, second_moment_max: float = 0.04) -> FormResult:
    """-r A without the tokens that hold the batch's second moment of log-ratios above the bound (arXiv 2510.01161).

    They stay in the denominators. The paper's ratio is against the sampler (the default anchor); AReaL's code compares
    with the old policy.
    """
    dropped = ~t.pooled["kept"]
    return -kept_ratio(t.log_ratio, dropped) * t.advantage, dropped


def _covariance(t: TokenInputs) -> jax.Array:
    """(A - mean A) (x - mean x), means over the batch's trained tokens."""
    x = t.logp_new
    return (t.advantage - batch_mean(t.advantage, t.mask)) * (x - batch_mean(x, t.mask))


def _share(mask: jax.Array, share: float) -> jax.Array:
    """How many tokens are that share of the trained ones: rounded down, at least 1."""
    return jnp.maximum((mask.sum().astype(jnp.float32) * share).astype(jnp.int32), 1)


def chosen_by_covariance(
    t: TokenInputs,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    covariance_share: float = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
) -> Statistics:
    """A share of the tokens, drawn from those that PPO does not clip and whose covariance lies in the band.

    The draw is a hash of the token's recorded log-prob, its position and its whole episode's, so it depends neither on
    packing nor on the order or the number of the batch's episodes. Episodes alike to the last token are drawn alike.
    """
    _, clipped = ppo(t, clip_low_threshold=clip_low_threshold, clip_high_threshold=clip_high_threshold)
    covariance = _covariance(t)
    candidates = t.mask & ~clipped & (covariance > covariance_low) & (covariance < covariance_high)
    drawn = drawn_numbers(t)
    return {"chosen": largest(drawn, drawn, candidates, _share(t.mask, covariance_share))}


def drawn_numbers(t: TokenInputs) -> jax.Array:
    """uint32, as if drawn: a hash of what was recorded when the token was sampled, and of its episode's tokens."""
    assert t.position is not None
    recorded = jax.lax.bitcast_convert_type(t.logp_sampler.astype(jnp.float32), jnp.uint32)
    own = _mixed(recorded ^ (t.position.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)))
    return _mixed(own ^ pool_sum(own, t.episode, t.mask))  # a sum modulo 2^32, in whatever order


def _mixed(bits: jax.Array) -> jax.Array:
    """The finalizer of MurmurHash3."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> jnp.uint32(shift))) * jnp.uint32(factor)
    return bits ^ (bits >> jnp.uint32(16))


def clip_cov(
    t: TokenInputs,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    covariance_share: float = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
) -> FormResult:
    """PPO without a random few of the tokens that drive entropy down (Clip-Cov, Cui et al. 2025, arXiv 2505.22617).

    Those whose covariance (A - mean A)(x - mean x) lies between the bounds; a share of the batch's tokens, at least
    one. On-policy, where PPO clips nothing, it still drops them: by design not REINFORCE's gradient.
    """
    loss, clipped = ppo(t, clip_low_threshold=clip_low_threshold, clip_high_threshold=clip_high_threshold)
    chosen = t.pooled["chosen"]
    return jnp.where(chosen, 0.0, loss), clipped | chosen


def top_by_covariance(t: TokenInputs, *, covariance_share: float = 2e-4) -> Statistics:
    """The share of the tokens with the largest covariance; of those that tie for the last place, as if drawn."""
    return {"chosen": largest(_covariance(t), drawn_numbers(t), t.mask, _share(t.mask, covariance_share))}


def kl_cov(t: TokenInputs, *, covariance_share: float = 2e-4, covariance_coef: float = 1.0) -> FormResult:
    """-r A, plus covariance_coef |x - o| on the tokens with the largest covariance (KL-Cov, arXiv 2505.22617).

    No clipping at all. verl's configuration passes 0.1 as the coefficient and its function defaults to 1; SkyRL takes a
    share of 0.2, and scales advantages before the covariance, so that its penalty is not divided by the aggregation.
    """
    distance = attached(jnp.abs(t.log_ratio), jnp.sign(t.log_ratio), t.logp_new)  # flat at 0, where JAX says 1
    penalty = jnp.where(t.pooled["chosen"], covariance_coef * distance, 0.0)
    return penalty - jnp.exp(t.log_ratio) * t.advantage, nowhere(t)


# --- pairs ----------------------------------------------------------------------------------------


def pair_margin(t: TokenInputs, *, dpo_beta: float = 0.1) -> Statistics:
    """dpo_beta times (x - f) summed over the chosen episode, less that over the rejected one; and the pair's tokens."""
    assert t.logp_ref is not None
    signed = jnp.sign(t.advantage) * (t.logp_new - t.logp_ref)
    return {
        "margin": dpo_beta * pool_sum(signed, t.group, t.mask),
        "tokens": pool_count(t.group, t.mask, t.logp_new.dtype),
    }


def dpo(t: TokenInputs, *, dpo_beta: float = 0.1) -> FormResult:
    """-log sigmoid(dpo_beta ((X_c - F_c) - (X_r - F_r))) of the pair (Rafailov et al. 2023, arXiv 2305.18290).

    A group is a pair, else a ValueError: A > 0 marks the chosen episode, A < 0 the rejected one. X and F are sums over
    tokens. For the aggregation `prompt_mean_token_sum`, the mean over pairs; a pair's tokens share its value.
    """
    z = t.pooled["margin"]
    slope = -dpo_beta * jax.nn.sigmoid(-z) * jnp.sign(t.advantage)
    return attached(-jax.nn.log_sigmoid(z) / t.pooled["tokens"], slope, t.logp_new), nowhere(t)
