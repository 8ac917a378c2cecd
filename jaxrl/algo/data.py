"""From episodes to datums: which tokens are trained, and where a new sequence has to start.

Knows trajectories and their endings. Knows nothing about renderers, packing or JAX, and never reads a text: a mask
comes from what was sampled. The work is linear in the size of the trajectories.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.algo.advantage import Advantage, Knob, teaches
from jaxrl.types import Datum, Trajectory, TrajectoryGroup, Transition, common_prefix

PREFIX_CHANGED = "prefix_changed"
"""The reason counted when an observation does not extend the turn before it and nobody said why."""


def extends(before: Transition, after: Transition) -> bool:
    """Whether the later context starts with the earlier context and action, id for id."""
    n, m = len(before.observation), len(before.action.tokens)
    return after.observation[:n] == before.observation and after.observation[n : n + m] == before.action.tokens


def split_reasons(trajectory: Trajectory) -> Counter[str]:
    """Why the episode needs more than one datum, counted: the transition's own reason, or "prefix_changed"."""
    pairs = itertools.pairwise(trajectory.transitions)
    return Counter(after.rewrite or PREFIX_CHANGED for before, after in pairs if not extends(before, after))


def trajectory_to_data(trajectory: Trajectory, advantage: Advantage, *, group: int, episode: int) -> list[Datum]:
    """The datums of one episode, each sampled token trained in exactly one of them; none if the ending is not trained.

    While every observation extends the turn before it there is a single datum. Otherwise a new one starts with the
    whole new context, masked out. Nothing follows the last sampled token. advantage: of the episode, or one for each
    of its turns, whose tokens share it. Raises ValueError when there are more or fewer of them than turns.
    """
    if not trajectory.ending.trained:
        return []
    turns = _turns(trajectory, advantage, f"episode {episode} of group {group}")
    data = (_datum(run, group, episode) for run in _runs(turns))
    return [datum for datum in data if datum is not None]


_Turn = tuple[Transition, float]
"""A turn with its advantage."""


def _turns(trajectory: Trajectory, advantage: Advantage, where: str) -> list[_Turn]:
    turns = trajectory.transitions
    by_turn = advantage if isinstance(advantage, tuple) else (advantage,) * len(turns)
    if len(by_turn) != len(turns):
        raise ValueError(f"{where} has {len(turns)} turns and {len(by_turn)} advantages: give one, or one a turn")
    return list(zip(turns, by_turn, strict=True))


def _runs(turns: Sequence[_Turn]) -> Iterator[list[_Turn]]:
    """Split the turns wherever one does not extend the turn before it."""
    run: list[_Turn] = []
    for turn, advantage in turns:
        if run and not extends(run[-1][0], turn):
            yield run
            run = []
        run.append((turn, advantage))
    if run:
        yield run


def _datum(run: list[_Turn], group: int, episode: int) -> Datum | None:
    """One datum from turns that extend each other, cut after its last trained token."""
    tokens: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    versions: list[int] = []
    for turn, advantage in run:
        context = turn.observation[len(tokens) :]
        tokens += context + turn.action.tokens
        logprobs += [0.0] * len(context) + list(turn.action.logprobs)
        advantages += [0.0] * len(context) + [advantage] * len(turn.action.tokens)
        versions += [-1] * len(context) + list(turn.action.versions)
        _check_context(turn, group, episode)
    mask_T = _trained(run, len(tokens))
    if not mask_T.any():
        return None
    n = int(np.flatnonzero(mask_T)[-1]) + 1
    return Datum(
        tokens=np.array(tokens[:n], np.int32),
        mask=mask_T[:n],
        logprobs=np.where(mask_T[:n], logprobs[:n], 0.0).astype(np.float32),
        advantages=np.where(mask_T[:n], advantages[:n], 0.0).astype(np.float32),
        versions=np.array(versions[:n], np.int32),
        group=group,
        episode=episode,
    )


def _check_context(turn: Transition, group: int, episode: int) -> None:
    if not turn.observation:
        raise ValueError(
            f"episode {episode} of group {group}: a turn has an empty observation, but the first token of a "
            "sequence has nothing to be predicted from. Let the env's observation hold at least one token"
        )


def _trained(run: list[_Turn], length: int) -> np.ndarray:
    """Where the policy's own tokens are, but for turns that stay as context only."""
    mask_T = np.zeros(length, bool)
    for turn, _ in run:
        start = len(turn.observation)
        mask_T[start : start + len(turn.action.tokens)] = not turn.masked
    return mask_T


# --- where turns begin ---------------------------------------------------------------------------


@dataclass(frozen=True)
class TurnStarts:
    """The contexts of a batch's turns, for whoever has something to say of each turn.

    data_D: their mask marks the token after each context, the first that the turn sampled; nothing follows the last
    mark. turns: for each turn, in the order of groups, members and turns, the number of its datum and of its marked
    token there. counts_P_G: how many of them each member has: as many as it took, or 0 if it does not count.
    """

    data_D: list[Datum]
    turns: list[tuple[int, int]]
    counts_P_G: list[list[int]]


def turn_starts(groups_P: Sequence[TrajectoryGroup]) -> TurnStarts:
    """Where the turns begin of all members that count; of masked turns too.

    The datums are split where those that are trained are. A turn that sampled nothing has a mark like any other; what
    is marked is then no token of the episode, and nothing may read it.
    """
    data_D: list[Datum] = []
    turns: list[tuple[int, int]] = []
    counts_P_G: list[list[int]] = []
    episode = 0
    for p, group in enumerate(groups_P):
        counts_P_G.append([])
        for trajectory in group.trajectories_G:
            counts = trajectory.ending.in_baseline
            counts_P_G[-1].append(len(trajectory.transitions) if counts else 0)
            for run in _runs(_turns(trajectory, 0.0, "")) if counts else ():
                turns += [(len(data_D), len(turn.observation)) for turn, _ in run]
                data_D.append(_starts(run, p, episode))
            episode += 1
    return TurnStarts(data_D, turns, counts_P_G)


def _starts(run: list[_Turn], group: int, episode: int) -> Datum:
    """The last context of turns that extend each other, and one token."""
    for turn, _ in run:
        _check_context(turn, group, episode)
    last, _ = run[-1]
    tokens = np.array([*last.observation, *(last.action.tokens or (0,))[:1]], np.int32)
    mask_T = np.zeros(len(tokens), bool)
    mask_T[[len(turn.observation) for turn, _ in run]] = True
    zeros_T = np.zeros(len(tokens), np.float32)
    return Datum(tokens, mask_T, zeros_T, zeros_T, np.full(len(tokens), -1, np.int32), group, episode)


def by_member(starts: TurnStarts, values_N: Sequence[float] | np.ndarray) -> list[list[tuple[float, ...]]]:
    """Numbers in the order of the starts, as values_P_G; none for members that do not count."""
    rest = iter(np.asarray(values_N).tolist())
    return [[tuple(itertools.islice(rest, n)) for n in counts_G] for counts_G in starts.counts_P_G]


def in_order(starts: TurnStarts, values_P_G: Sequence[Sequence[Any]]) -> np.ndarray:
    """The opposite of `by_member`, which leaves out what it is given of members that do not count."""
    pairs = (
        (turns, n)
        for values_G, counts_G in zip(values_P_G, starts.counts_P_G, strict=True)
        for turns, n in zip(values_G, counts_G, strict=True)
    )
    return np.array([value for turns, n in pairs if n for value in turns], np.float64)


# --- whole batches -------------------------------------------------------------------------------


def duplicated_tokens(data_D: Sequence[Datum]) -> int:
    """Tokens that are processed again because episodes were split: what a datum begins with, id for id, as another of
    its episode does. They are all the tokens of the data less those of every episode's distinct beginnings."""
    episodes: defaultdict[tuple[int, int], list[tuple[int, ...]]] = defaultdict(list)
    for datum in data_D:
        episodes[datum.group, datum.episode].append(tuple(datum.tokens.tolist()))
    # Sorted sequences share their longest beginnings with a neighbour.
    return sum(common_prefix(a, b) for parts in episodes.values() for a, b in itertools.pairwise(sorted(parts)))


def trainable(groups_P: Sequence[TrajectoryGroup], method: str = "mean", **knobs: Knob) -> list[bool]:
    """Which groups of a batch can teach anything: those that are viable, as `teaches` says of them.

    With most methods, and by default, they have at least two members that count, with different rewards.
    """
    can = iter(teaches([g for g in groups_P if g.viable], method, **knobs))
    return [g.viable and next(can) for g in groups_P]


def assemble_training_data(
    groups_P: Sequence[TrajectoryGroup],
    advantages_P_G: Sequence[Sequence[Advantage]],
    *,
    overlong_masking: bool = False,
    first_group: int = 0,
) -> list[Datum]:
    """data_D of a batch. Episodes are numbered through the batch, in order, whether or not they yield datums.

    overlong_masking: episodes that a budget cut short (`Ending.overlong`) are not trained; their rewards still
    count in the advantages, which were computed before. first_group: the number of the first group, for a batch that
    comes in parts.
    """
    data_D: list[Datum] = []
    episode = 0
    for p, (group, advantages_G) in enumerate(zip(groups_P, advantages_P_G, strict=True), start=first_group):
        for trajectory, advantage in zip(group.trajectories_G, advantages_G, strict=True):
            if not (overlong_masking and trajectory.ending.overlong):
                data_D += trajectory_to_data(trajectory, advantage, group=p, episode=episode)
            episode += 1
    return data_D
