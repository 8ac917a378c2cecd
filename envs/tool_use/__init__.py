"""Answer questions about bundled facts with three tools: list_fact_keys, lookup, calculator."""

from envs.tool_use.answers import read_answer
from envs.tool_use.calculator import calculate
from envs.tool_use.demonstration import demonstrate
from envs.tool_use.facts import Split, facts
from envs.tool_use.game import INSTRUCTIONS, TOOLS, ToolUseEnv, make_env
from envs.tool_use.tasks import LEVELS, pool, tasks

__all__ = [
    "INSTRUCTIONS",
    "LEVELS",
    "TOOLS",
    "Split",
    "ToolUseEnv",
    "calculate",
    "demonstrate",
    "facts",
    "make_env",
    "pool",
    "read_answer",
    "tasks",
]
