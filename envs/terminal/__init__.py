"""Terminal tasks in Harbor's format, and the sandboxes that they run in: bubblewrap, or Docker where it answers."""

from envs.terminal.bubblewrap import Bubblewrap
from envs.terminal.docker import Docker
from envs.terminal.environment import INSTRUCTIONS, HarborEnv, harbor_task, make_env
from envs.terminal.files import read_tree
from envs.terminal.grading import GraderError, Rewards
from envs.terminal.harbor_task import HarborTask, InvalidTask, UnsupportedTask, find_tasks, load_task
from envs.terminal.oracle import Attempt, attempt, demonstrate
from envs.terminal.rootfs import Images, parse_images
from envs.terminal.sandbox import (
    CommandResult,
    File,
    Limits,
    RefusedFile,
    Sandbox,
    SandboxFactory,
    SandboxFault,
    SandboxProcess,
    SandboxSpec,
    SandboxUnavailable,
)
from envs.terminal.shell import Shell
from envs.terminal.trial import Trial, TrialOptions, plan

__all__ = [
    "INSTRUCTIONS",
    "Attempt",
    "Bubblewrap",
    "CommandResult",
    "Docker",
    "File",
    "GraderError",
    "HarborEnv",
    "HarborTask",
    "Images",
    "InvalidTask",
    "Limits",
    "RefusedFile",
    "Rewards",
    "Sandbox",
    "SandboxFactory",
    "SandboxFault",
    "SandboxProcess",
    "SandboxSpec",
    "SandboxUnavailable",
    "Shell",
    "Trial",
    "TrialOptions",
    "UnsupportedTask",
    "attempt",
    "demonstrate",
    "find_tasks",
    "harbor_task",
    "load_task",
    "make_env",
    "parse_images",
    "plan",
    "read_tree",
]
