"""Our own terminal tasks, made by code: a table of them, one file for each difficulty."""

from envs.terminal.tasks.easy import EASY
from envs.terminal.tasks.hard import HARD
from envs.terminal.tasks.medium import MEDIUM
from envs.terminal.tasks.task import DIFFICULTIES, Check, Difficulty, OwnTask, Step

TASKS: tuple[OwnTask, ...] = (*EASY, *MEDIUM, *HARD)

__all__ = ["DIFFICULTIES", "TASKS", "Check", "Difficulty", "OwnTask", "Step"]
