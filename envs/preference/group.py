"""Pairwise preferences: several episodes of one task, rewarded by how their answers compare with each other.

Knows episodes, tournaments and judges. The reward of a member is the mean of its wins and losses (tournament.py) and
format_coef * (format - 1), where format is 1 for an answer of the right form, else 0.

Without the judge: answers that are the same, message for message, tie; an episode that ended without an answer loses
to every answer, and ties with another of its kind. That is the policy's doing, and no fault. A judge that fails is a
fault: it is asked again, and then the comparison is missing from the means of both sides. When a member has none left,
nothing is known of it, and the grading fails, as `ENDINGS` has it: GRADER_ERROR, never a reward.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from envs.preference.comparison import (
    FIRST,
    SECOND,
    TIE,
    Comparison,
    Conversation,
    Judge,
    JudgeFault,
    Preference,
    answer,
)
from envs.preference.episode import Contestant, Lift, finished, make_env
from envs.preference.judging import Judging, Missing, compare_all
from envs.preference.tournament import Pattern, Scale, Standing, check_pattern, check_scale, pairs, reward, standings
from jaxrl.env import Env, EnvFactory, EnvGroupBuilder
from jaxrl.types import Message, Metrics, Task, Trajectory


def any_format(text: str) -> bool:
    """The check of answers that need no form."""
    return True


@dataclass(frozen=True)
class PairwisePreferenceGroupBuilder(EnvGroupBuilder):
    """`group_size` episodes of one task, compared by `judge`.

    lift: how the envs become tokens; let its rules give nothing for turns that cannot be read
    (`TurnRules(failed_parse_reward=0)`), as those are counted here. pattern: of the comparisons. matchup_group_size:
    members are compared in runs of about so many, at a cost that no longer grows with the square of the group. scale:
    "plus_minus" for wins of 1 and losses of -1, "win_rate" for 1 and 0. check_format: of the last response's text.
    references: answers that every member is compared with too, such as one from a data set; with group_size=1 the
    win rate against them. They make wins and losses no longer sum to zero.

    Metrics of a member: win_rate (0.5 when it was compared with nobody), format, comparisons, comparisons_missing, and
    judge_first_share, which tells of a judge that likes one place better if it is not 0.5.
    """

    task: Task
    lift: Lift
    group_size: int
    judge: Judge
    pattern: Pattern = "all_pairs_both_ways"
    matchup_group_size: int | None = None
    scale: Scale = "plus_minus"
    format_coef: float = 1.0
    check_format: Callable[[str], bool] = any_format
    references: tuple[str, ...] = ()
    judging: Judging = field(default_factory=Judging)
    env_factory: EnvFactory = make_env
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size={self.group_size}: expected at least 1")
        if not self.format_coef >= 0:
            raise ValueError(f"format_coef={self.format_coef}: expected 0 or more; a wrong form is a penalty")
        check_pattern(self.pattern, self.matchup_group_size)
        check_scale(self.scale)

    async def make_envs(self) -> Sequence[Env]:
        """One env per member. When one cannot be made, those before it are closed."""
        envs: list[Env] = []
        async with AsyncExitStack() as made:
            while len(envs) < self.group_size:
                envs.append(await self._env())
                made.push_async_callback(envs[-1].close)
            made.pop_all()
        return envs

    async def remake(self, member: int) -> Env:
        """One more of the same."""
        return await self._env()

    async def compute_group_rewards(
        self, trajectories_G: Sequence[Trajectory], envs_G: Sequence[Env]
    ) -> Sequence[tuple[float, Metrics]]:
        """Compare the members with each other, all comparisons at once.

        Raises JudgeFault when no comparison of a member could be judged.
        """
        members = [_member(env) for env in envs_G]
        answers = [
            m.completion if finished(t, m.completion) else None for t, m in zip(trajectories_G, members, strict=True)
        ]
        compared = [*answers, *((Message("assistant", text),) for text in self.references)]
        shown = pairs(
            len(members),
            self.pattern,
            matchup_group_size=self.matchup_group_size,
            references=len(self.references),
        )
        prompt = members[0].prompt if members else ()
        verdicts = await self._verdicts(prompt, [(compared[i], compared[j]) for i, j in shown])
        known = [verdict if isinstance(verdict, Preference) else None for verdict in verdicts]
        reasons = [verdict.reason for verdict in verdicts if isinstance(verdict, Missing)]
        return [
            self._rewarded(completion, standing, reasons)
            for completion, standing in zip(answers, standings(len(members), shown, known), strict=True)
        ]

    async def _verdicts(
        self, prompt: Conversation, shown: Sequence[tuple[Conversation | None, Conversation | None]]
    ) -> list[Preference | Missing]:
        """The verdict of each pair; the judge is asked where it does not follow from the answers."""
        verdicts: list[Preference | Missing | None] = [_evident(*pair) for pair in shown]
        open_pairs = [i for i, verdict in enumerate(verdicts) if verdict is None]
        comparisons = [Comparison(prompt, shown[i][0] or (), shown[i][1] or ()) for i in open_pairs]
        for i, verdict in zip(open_pairs, await compare_all(self.judge, comparisons, self.judging), strict=True):
            verdicts[i] = verdict
        return [verdict for verdict in verdicts if verdict is not None]

    def _rewarded(
        self, completion: Conversation | None, standing: Standing, reasons: Sequence[str]
    ) -> tuple[float, Metrics]:
        if standing.share is None:
            raise JudgeFault(
                f"none of the {standing.missing} comparisons of an answer could be judged, so it has no reward; the "
                f"last: {reasons[-1]}"
            )
        formed = float(completion is not None and bool(self.check_format(answer(completion))))
        metrics = {
            "win_rate": standing.share,
            "format": formed,
            "comparisons": float(standing.judged),
            "comparisons_missing": float(standing.missing),
            "judge_first_share": standing.first_share,
        }
        return reward(standing.share, self.scale) + self.format_coef * (formed - 1.0), metrics

    def logging_tags(self) -> Sequence[str]:
        """The dataset's tags."""
        return self.tags

    def describe(self) -> str:
        """The task's prompt."""
        return self.task.prompt

    async def _env(self) -> Contestant:
        made = self.env_factory(self.task)
        player = await made if inspect.isawaitable(made) else made
        return Contestant(player, self.lift(player, self.task))


def _member(env: Env) -> Contestant:
    if not isinstance(env, Contestant):
        raise TypeError(f"{env.describe()} is no Contestant: give the envs that make_envs or remake of this group made")
    return env


def _evident(first: Conversation | None, second: Conversation | None) -> Preference | None:
    """The verdict on answers of which one is missing, or that are the same; None is for the judge to say."""
    if first == second:
        return TIE
    if first is None or second is None:
        return SECOND if first is None else FIRST
    return None
