"""Credit inside an episode: returns by turn, turns that began in the same state, a critic's temporal differences.

Knows the members of a group, turns and numbers. Must not know losses, critics' networks or JAX. In all of it the
turn is the step of the decision process: gamma discounts by turns, and the tokens of a turn share its advantage. What
works on tokens, for a critic that is trained on them, is `gae_tokens`.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from jaxtyping import Bool, Float

from jaxrl.algo.members import Members, centred, standardised, turn_rewards
from jaxrl.types import Trajectory, common_prefix

Keys = Sequence[Sequence[Hashable]]
"""For each turn of each member, what it is compared by."""

Compare = Callable[[np.ndarray], np.ndarray]


def discounted_returns(rewards_T: Float[np.ndarray, " T"], gamma: float) -> Float[np.ndarray, " T"]:
    """R_t + gamma R_{t+1} + gamma^2 R_{t+2} + ..., of each step to the end."""
    returns_T, following = np.zeros(len(rewards_T)), 0.0
    for t in reversed(range(len(rewards_T))):
        following = rewards_T[t] + gamma * following
        returns_T[t] = following
    return returns_T


def returns_of(members: Members, gamma: float) -> list[np.ndarray]:
    """The discounted return of each turn of each member."""
    return [discounted_returns(rewards, gamma) for rewards in turn_rewards(members)]


# --- turns compared with turns -------------------------------------------------------------------


def newly_observed(trajectory: Trajectory) -> list[Hashable]:
    """What each turn was shown that was not in the context before; where that is nothing, the whole context.

    After a rewrite it is what follows the longest common prefix.
    """
    seen: list[Hashable] = []
    held: tuple[int, ...] = ()
    for turn in trajectory.transitions:
        new = turn.observation[common_prefix(held, turn.observation) :]
        seen.append(new or turn.observation)
        held = turn.observation + turn.action.tokens
    return seen


def whole_context(trajectory: Trajectory) -> list[Hashable]:
    """Everything a turn was sampled from: only equal histories are the same state."""
    return [turn.observation for turn in trajectory.transitions]


STATES: dict[str, Callable[[Trajectory], list[Hashable]]] = {
    "observation": newly_observed,
    "context": whole_context,
}
"""What makes the state of two turns the same, both ids for ids."""

PEERS: dict[str, Callable[[Trajectory], list[Hashable]]] = {
    "group": lambda trajectory: [None for _ in trajectory.transitions],
    "turn": lambda trajectory: list(range(len(trajectory.transitions))),
}
"""Which turns of the group a turn's return is compared with: all of them, or those with its number."""

NO_PEERS = "none"


def states(members: Members, state: str) -> list[list[Hashable]]:
    """The state each turn of each member began in."""
    return [STATES[state](trajectory) for trajectory in members.trajectories_G]


def by_key(values_G: Sequence[np.ndarray], keys_G: Keys) -> dict[Hashable, np.ndarray]:
    """The values of all turns that have the same key."""
    same: defaultdict[Hashable, list[float]] = defaultdict(list)
    for values, keys in zip(values_G, keys_G, strict=True):
        for value, key in zip(values.tolist(), keys, strict=True):
            same[key].append(value)
    return {key: np.array(values, np.float64) for key, values in same.items()}


def compared(values_G: Sequence[np.ndarray], keys_G: Keys, compare: Compare) -> list[np.ndarray]:
    """Each turn's value as `compare` makes it of those with its key; a key that only one turn has gives 0."""
    peers = {key: iter(compare(values).tolist()) for key, values in by_key(values_G, keys_G).items()}
    return [np.array([next(peers[key]) for key in keys], np.float64) for keys in keys_G]


def turn_returns(members: Members, *, gamma: float = 1.0, peers: str = "group") -> list[np.ndarray]:
    """The discounted return of a turn, less the mean over its peers in the group.

    peers: "group" compares with every turn of every member, so that longer episodes weigh more in the mean (ROLL's
    grouping by trajectory group); "turn" with those of the same number, where the last turns of the longest episode
    have no peer and get 0; "none" is the return itself. With one turn an episode, the first two are `mean`.
    """
    returns_G = returns_of(members, gamma)
    if peers == NO_PEERS:
        return returns_G
    return compared(returns_G, [PEERS[peers](t) for t in members.trajectories_G], centred)


def turn_return_signals(members: Members, *, gamma: float, peers: str) -> list[np.ndarray]:
    """What has to differ for `turn_returns` to teach."""
    keys_G = [PEERS["group" if peers == NO_PEERS else peers](t) for t in members.trajectories_G]
    return list(by_key(returns_of(members, gamma), keys_G).values())


EPISODE_ROWS: dict[str, Callable[[Members], np.ndarray]] = {
    "episodes": lambda members: members.rewards_G,
    "turns": lambda members: np.repeat(members.rewards_G, [len(t.transitions) for t in members.trajectories_G]),
}
"""What GiGPO's baseline of episodes is the mean of: every episode once, or once for each of its turns."""


def gigpo(
    members: Members,
    *,
    omega: float = 1.0,
    gamma: float = 0.95,
    state: str = "observation",
    episode_baseline: str = "episodes",
) -> list[np.ndarray]:
    """A = A_E + omega A_S (Feng et al. 2025, arXiv 2505.10978, eq. 3-8), without dividing by standard deviations.

    A_E: the episode's reward less the group's mean. A_S: the discounted return of the turn less the mean over all
    turns of the group that began in the same state; 0 for a state that was met once.
    state: what the turn was newly shown ("observation"), or its whole "context".
    episode_baseline: "episodes"; "turns" is the default of verl-agent, where longer episodes weigh more.
    verl-agent gives a group of one its raw reward; here it has no advantage, like every group of one.
    """
    rows = EPISODE_ROWS[episode_baseline](members)
    episode_G = centred(members.rewards_G, rows)
    step_G = compared(returns_of(members, gamma), states(members, state), centred)
    return _both(episode_G, step_G, omega)


def gigpo_std(
    members: Members,
    *,
    omega: float = 1.0,
    gamma: float = 0.95,
    state: str = "observation",
    episode_baseline: str = "episodes",
    ddof: float = 1.0,
    epsilon: float = 1e-6,
) -> list[np.ndarray]:
    """`gigpo` with both parts divided by (their standard deviation + epsilon): F_norm = std in the paper."""
    rows = EPISODE_ROWS[episode_baseline](members)
    episode_G = standardised(members.rewards_G, ddof=ddof, epsilon=epsilon, rows=rows)
    step_G = compared(
        returns_of(members, gamma),
        states(members, state),
        lambda values: standardised(values, ddof=ddof, epsilon=epsilon),
    )
    return _both(episode_G, step_G, omega)


def gigpo_signals(members: Members, *, gamma: float, state: str, **_: float | str) -> list[np.ndarray]:
    """What has to differ for `gigpo` to teach: the rewards, or the returns from one state.

    Members that all won teach, then, when some of them won sooner.
    """
    return [members.rewards_G, *by_key(returns_of(members, gamma), states(members, state)).values()]


def _both(episode_G: np.ndarray, step_G: Sequence[np.ndarray], omega: float) -> list[np.ndarray]:
    return [episode + omega * step_T for episode, step_T in zip(episode_G, step_G, strict=True)]


# --- with a critic -------------------------------------------------------------------------------


def gae(
    rewards_T: Float[np.ndarray, " T"], values_T: Float[np.ndarray, " T"], *, gamma: float, lam: float
) -> Float[np.ndarray, " T"]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438): the sum of (gamma lam)^k delta_{t+k}.

    delta_t = r_t + gamma v_{t+1} - v_t, and the value after the last step is 0, however the episode ended. The steps
    may be turns (Turn-PPO, arXiv 2512.17008) or tokens. The critic's targets are advantages + values.
    """
    following_T = np.append(values_T[1:], 0.0)
    return discounted_returns(rewards_T + gamma * following_T[: len(values_T)] - values_T, gamma * lam)


def _carry(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return rewards[mask], values[mask], np.flatnonzero(mask)


def _naive(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return rewards, values, np.arange(len(mask))


def _zeroed(rewards: np.ndarray, values: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return rewards, np.where(mask, values, 0.0), np.arange(len(mask))


HOLES = {"carry": _carry, "naive": _naive, "zeroed": _zeroed}
"""The steps that a recursion over tokens makes of a sequence: their rewards, their values, and where they lie."""


def gae_tokens(
    rewards_T: Float[np.ndarray, " T"],
    values_T: Float[np.ndarray, " T"],
    mask_T: Bool[np.ndarray, " T"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    hole: str = "carry",
) -> Float[np.ndarray, " T"]:
    """`gae` over the tokens of an episode, 0 where the policy did not sample.

    hole: what lies between the turns. Ours is "carry": the token after a turn's last is the next turn's first, as if
    nothing lay between them, so values at observations are never read (verl, tunix and NeMo-RL do the same). "naive"
    takes observations for steps, with the critic's values there (SkyRL, slime); "zeroed" with the value 0 (OpenRLHF),
    which ends the bootstrap at each tool turn. Raises ValueError for a reward where nothing was sampled.
    """
    if hole not in HOLES:
        raise ValueError(f"hole={hole!r}: expected one of {', '.join(HOLES)}")
    if rewards_T[~mask_T].any():
        raise ValueError(
            f"rewards at tokens {np.flatnonzero((rewards_T != 0) & ~mask_T).tolist()} that the policy did not sample: "
            "give what an observation was worth to the last token of the turn that led to it"
        )
    rewards, values, places = HOLES[hole](rewards_T, values_T, mask_T)
    advantages_T = np.zeros(len(mask_T))
    advantages_T[places] = gae(rewards, values, gamma=gamma, lam=lam)
    return np.where(mask_T, advantages_T, 0.0)
