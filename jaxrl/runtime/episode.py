"""One episode: an Env and a Session talk until a limit, the env, or an error ends it.

Knows the token-level Env, the sampler's Session and the limits. Knows no renderer, no group and no training.
"""

import hashlib
from dataclasses import dataclass, fields

from jaxrl.env import ActionExtra, Env, Observation
from jaxrl.runtime.sampler import Session
from jaxrl.types import StopReason, Transition, common_prefix


@dataclass(frozen=True)
class Limits:
    """Budgets of an episode; None is unlimited (the engine's context always binds).

    max_tokens: sampled tokens of one turn. max_turns: turns. max_sampled_tokens: sampled tokens of an episode.
    max_episode_tokens: prompt, observations and samples together.
    """

    max_tokens: int
    max_turns: int | None = None
    max_sampled_tokens: int | None = None
    max_episode_tokens: int | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and value < 1:
                raise ValueError(f"{f.name}={value}: expected at least 1, or None for no limit")

    def turn_budget(self, turns: int, sampled: int, held: int, context: int) -> int | StopReason:
        """Tokens the next turn may sample, or the reason why there is no next turn.

        sampled, held: tokens of the episode so far, sampled ones and all. context: what the engine can hold.
        """
        if self.max_turns is not None and turns >= self.max_turns:
            return StopReason.MAX_TURNS
        if held >= context:
            return StopReason.CONTEXT_OVERFLOW
        left = [self.max_tokens, context - held]
        if self.max_sampled_tokens is not None:
            left.append(self.max_sampled_tokens - sampled)
        if self.max_episode_tokens is not None:
            left.append(self.max_episode_tokens - held)
        return min(left) if min(left) > 0 else StopReason.MAX_TOKENS


async def run_episode(
    env: Env, session: Session, limits: Limits, *, temperature: float, transitions: list[Transition]
) -> StopReason:
    """Play `env` to its end and say why it ended.

    transitions: filled turn by turn, so that the caller holds the finished part of an episode that is interrupted.
    """
    observation, stop = await env.initial_observation()
    rewrite: str | None = None
    while True:
        sampled = sum(len(t.action.tokens) for t in transitions)
        budget = limits.turn_budget(len(transitions), sampled, len(observation), session.capacity)
        if isinstance(budget, StopReason):
            return budget
        new = _return_to(session, observation)
        action = await session.sample(new, stop=stop, max_tokens=budget, temperature=temperature)
        result = await env.step(action.tokens, extra=ActionExtra(action.stop))
        transitions.append(
            Transition(
                observation=observation,
                action=action,
                reward=result.reward,
                episode_done=result.episode_done,
                metrics=result.metrics,
                logs=result.logs,
                rewrite=rewrite,
            )
        )
        if result.episode_done:
            return result.stop_reason or StopReason.TERMINATED
        observation, stop, rewrite = result.next_observation, result.next_stop_condition, result.rewrite


def _return_to(session: Session, observation: Observation) -> Observation:
    """Rewind to what the new context shares with the old one; return the tokens that are new."""
    shared = common_prefix(session.tokens, observation)
    session.rewind(shared)
    return observation[shared:]


def episode_seed(*identity: int | str) -> int:
    """A 64-bit seed from what an episode is (run seed, split, step, group, member), not from when it ran."""
    digest = hashlib.blake2b("/".join(map(str, identity)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
