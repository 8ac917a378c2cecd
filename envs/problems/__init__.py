"""Problems with answers that can be checked: arithmetic by seed, mathematics in files of one's own, reasoning-gym."""

from envs.problems.answers import FORMS, Form, last_boxed, last_hashes, last_tags
from envs.problems.arithmetic import OPERATIONS, Split, arithmetic, is_held_out
from envs.problems.dataset import Row, RowFormat, keep_apart, read_problems
from envs.problems.grading import Verdict, equal, judge
from envs.problems.gym_problem import GymProblem, gym_problems
from envs.problems.isolated import WorkerLimits
from envs.problems.problem import MathProblem
from envs.problems.symbolic import prove

__all__ = [
    "FORMS",
    "OPERATIONS",
    "Form",
    "GymProblem",
    "MathProblem",
    "Row",
    "RowFormat",
    "Split",
    "Verdict",
    "WorkerLimits",
    "arithmetic",
    "equal",
    "gym_problems",
    "is_held_out",
    "judge",
    "keep_apart",
    "last_boxed",
    "last_hashes",
    "last_tags",
    "prove",
    "read_problems",
]
