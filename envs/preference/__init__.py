"""Learning from preferences: answers compared in pairs by any judge, or graded by a rubric."""

from envs.preference.asking import COMPARE, GRADE, read_score, read_verdict
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
    spoken,
)
from envs.preference.episode import Contestant, Lift, PreferenceEnv, make_env, opening
from envs.preference.graded import RubricEnv, graded_by
from envs.preference.group import PairwisePreferenceGroupBuilder, any_format
from envs.preference.judges import (
    BothOrders,
    FunctionJudge,
    Link,
    MakeModel,
    Model,
    ModelJudge,
    RewardModelJudge,
    Score,
)
from envs.preference.judging import Judging, Missing, compare_all
from envs.preference.limit import Limit
from envs.preference.opposites import ANSWERS, OPPOSITES, opposite, question
from envs.preference.rubric import Criterion, Grader, Measure, Rubric, check_rubric, grade, total
from envs.preference.rubric_file import read_prompts, read_rubrics
from envs.preference.shorter import Shorter, WellFormed, well_formed
from envs.preference.tournament import Pattern, Scale, Standing, matchups, pairs, reward, standings

__all__ = [
    "ANSWERS",
    "COMPARE",
    "FIRST",
    "GRADE",
    "OPPOSITES",
    "SECOND",
    "TIE",
    "BothOrders",
    "Comparison",
    "Contestant",
    "Conversation",
    "Criterion",
    "FunctionJudge",
    "Grader",
    "Judge",
    "JudgeFault",
    "Judging",
    "Lift",
    "Limit",
    "Link",
    "MakeModel",
    "Measure",
    "Missing",
    "Model",
    "ModelJudge",
    "PairwisePreferenceGroupBuilder",
    "Pattern",
    "Preference",
    "PreferenceEnv",
    "RewardModelJudge",
    "Rubric",
    "RubricEnv",
    "Scale",
    "Score",
    "Shorter",
    "Standing",
    "WellFormed",
    "answer",
    "any_format",
    "check_rubric",
    "compare_all",
    "grade",
    "graded_by",
    "make_env",
    "matchups",
    "opening",
    "opposite",
    "pairs",
    "question",
    "read_prompts",
    "read_rubrics",
    "read_score",
    "read_verdict",
    "reward",
    "spoken",
    "standings",
    "total",
    "well_formed",
]
