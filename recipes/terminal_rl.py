"""Terminal tasks: a model works in a sandboxed shell, and a task's own tests say what it is worth.

    python -m recipes.terminal_rl                   a tiny model, built in place, on three of our easiest tasks
    python -m recipes.terminal_rl model_name=<model> warm_start=None max_tokens=512 max_turns=10 packing=None \\
        dataset_builder.names=None dataset_builder.difficulty=medium dataset_builder.output_bytes=4096 \\
        dataset_builder.show_tools=True dataset_builder.instructions='Use bash.' engine.context=8192 learning_rate=1e-4
    ... dataset_builder.tasks=DIRECTORY             any tasks in Harbor's format, below a directory
    ... dataset_builder.sandbox=docker dataset_builder.grading=shared
    ... dataset_builder.sandbox=my_package.remote:factory         Modal, Daytona, E2B: envs/terminal/sandbox.py

The tiny model has three commands to learn. Its warm start shows somebody who knows the form and makes a plausible
mistake in most tasks, so right commands are among those it types, and the tests find out which they are. It is shown
no system message, no description of the tool and little of a command's output, which are for larger models.
Sandboxes need bubblewrap, and user namespaces: pip install 'jaxrl[terminal]'.
"""

import functools
import importlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import trio

from envs import terminal
from envs.terminal import Bubblewrap, Docker, SandboxFactory, TrialOptions
from envs.terminal.generate import write_tasks
from envs.terminal.tasks import TASKS, Step
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.chat.families import renderer_for
from jaxrl.chat.renderer import Renderer
from jaxrl.env import RLDataset, RLDatasetBuilder
from jaxrl.models.lora import LoraConfig
from jaxrl.runtime.engine import EngineConfig
from jaxrl.runtime.learner import Packing
from jaxrl.runtime.message_env import MessageEnvDataset, TurnRules
from jaxrl.runtime.policy import policy_tokenizer
from jaxrl.runtime.strategy import MinViableGroup
from jaxrl.runtime.warm_start import Demonstration, Demonstrator, WarmStart, check_same_settings
from jaxrl.train import Config, command
from jaxrl.types import Message, Task

SANDBOXES: dict[str, SandboxFactory] = {"bubblewrap": Bubblewrap(), "docker": Docker()}
EASIEST = ("sort-numbers", "count-matches", "delete-temporary")
"""Tasks whose solution is the same in every instance."""


def sandbox_factory(name: str) -> SandboxFactory:
    """A row of `SANDBOXES`, or the factory that `package.module:name` is."""
    if name in SANDBOXES:
        return SANDBOXES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"sandbox={name!r}: expected one of {', '.join(SANDBOXES)}, or package.module:factory")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"sandbox={name!r}: {error}") from error


@dataclass(frozen=True)
class HarborDatasetBuilder(RLDatasetBuilder):
    """Terminal tasks: `batch_size` tasks a step, `group_size` attempts at each, `test_tasks` held out.

    tasks: a directory with tasks in Harbor's format; None makes our own below `own_tasks`, those of a `difficulty` and
    in `names` (None is all), `steps` batches of new instances. epochs: passes over the tasks of a directory.
    max_turns: turns after which an attempt is graded; None leaves that to the run. sandbox_timeout, command_timeout,
    grader_timeout: seconds an attempt has, one command, and the tests; None is what the task says. sandbox, rootfs
    (IMAGE=DIRECTORY, what stands for the image of a FROM), grading, network, memory_mb, disk_mb, output_bytes,
    host_env, artifacts: fields of `TrialOptions`. reward_key: which of several rewards counts. instructions: the system
    message. show_tools: describe the tool. model_name, renderer_name: for use without a run, whose renderer is the one
    it is called with.
    """

    tasks: str | None = None
    batch_size: int = 2
    group_size: int = 8
    model_name: str | None = None
    renderer_name: str | None = None
    max_turns: int | None = None
    sandbox_timeout: float | None = None
    command_timeout: float = 60.0
    grader_timeout: float | None = None
    difficulty: str | None = "easy"
    names: tuple[str, ...] | None = EASIEST
    own_tasks: str = "runs/terminal_tasks"
    steps: int = 60
    epochs: int = 1
    test_tasks: int = 6
    seed: int = 0
    sandbox: str = "bubblewrap"
    rootfs: tuple[str, ...] = ()
    grading: Literal["fresh", "shared"] = "fresh"
    network: bool = False
    memory_mb: int = 2048
    disk_mb: int = 512
    output_bytes: int = 4096
    host_env: tuple[str, ...] = ()
    artifacts: str | None = None
    reward_key: str | None = None
    instructions: str | None = terminal.INSTRUCTIONS
    show_tools: bool = True

    def __post_init__(self) -> None:
        if self.sandbox == "docker" and self.grading == "fresh":
            raise ValueError("sandbox=docker with grading=fresh: a container has no second root; set grading=shared")
        if self.renderer_name is not None and self.model_name is None:
            raise ValueError(f"renderer_name={self.renderer_name!r} has no effect without model_name")
        if self.tasks is not None and self.names not in (None, EASIEST):
            raise ValueError("names has no effect with tasks: it chooses among our own")
        if self.tasks is None and self.epochs != 1:
            raise ValueError("epochs has no effect without tasks: every step has new instances of our own; set steps")

    async def __call__(self, renderer: Renderer | None = None) -> tuple[RLDataset, RLDataset | None]:
        """Training tasks, and held-out ones that training never sees. All are read, and what cannot run is named."""
        shown = self._renderer(renderer)
        train, test = self._directories()
        options = self.options()
        tasks = {each: checked_task(each, options) for each in dict.fromkeys([*train, *test])}
        make_env = partial(
            terminal.make_env,
            options=options,
            max_turns=self.max_turns,
            reward_key=self.reward_key,
            instructions=self.instructions,
            show_tools=self.show_tools,
        )
        chosen = [tasks[each] for each in train]
        held_out = [tasks[each] for each in test]
        rules = TurnRules(max_unread_turns=3)
        return (
            MessageEnvDataset(chosen, make_env, shown, self.batch_size, self.group_size, rules),
            MessageEnvDataset(held_out, make_env, shown, len(held_out), 1, rules) if held_out else None,
        )

    def options(self) -> TrialOptions:
        """How attempts are made."""
        return TrialOptions(
            sandbox=sandbox_factory(self.sandbox),
            images=terminal.parse_images(self.rootfs, by_name=self.sandbox != "bubblewrap"),
            grading=self.grading,
            network=self.network,
            agent_seconds=self.sandbox_timeout,
            command_seconds=self.command_timeout,
            grader_seconds=self.grader_timeout,
            memory_mb=self.memory_mb,
            disk_mb=self.disk_mb,
            output_bytes=self.output_bytes,
            host_env=self.host_env,
            artifacts=None if self.artifacts is None else Path(self.artifacts),
        )

    def _renderer(self, given: Renderer | None) -> Renderer:
        if self.model_name is None and given is not None:
            return given
        if self.model_name is None or given is not None:
            raise ValueError(
                "the renderer comes from the run, or from model_name where there is none: give exactly one of them"
            )
        return renderer_for(policy_tokenizer(self.model_name), self.renderer_name)

    def _directories(self) -> tuple[list[Path], list[Path]]:
        rng = np.random.default_rng(self.seed)
        if self.tasks is None:
            train = own_instances(self, 2 * self.seed, self.batch_size * self.steps)
            return train, own_instances(self, 2 * self.seed + 1, self.test_tasks)
        found = terminal.find_tasks(Path(self.tasks))
        if self.test_tasks >= len(found) > 1:
            raise ValueError(
                f"test_tasks={self.test_tasks}: {self.tasks} has {len(found)} tasks, which leaves none to train on"
            )
        order = [found[i] for i in np.random.default_rng([self.seed, 1]).permutation(len(found))]
        held_out = min(self.test_tasks, len(found) - 1)
        train = order[held_out:]
        epochs = [[train[i] for i in rng.permutation(len(train))] for _ in range(self.epochs)]
        return [each for epoch in epochs for each in epoch], order[:held_out]


def own_instances(builder: HarborDatasetBuilder, stream: int, count: int) -> list[Path]:
    """`count` instances of our own tasks, each name in turn. No two streams share an instance."""
    names = builder.names or tuple(t.name for t in TASKS if builder.difficulty in (None, t.difficulty))
    rounds = -(-count // len(names)) if names else 0
    place, kind = Path(builder.own_tasks), builder.difficulty
    made = [
        write_tasks(place, difficulty=kind, seed=stream * 1_000_000 + i, names=builder.names) for i in range(rounds)
    ]
    return [each for one in made for each in one][:count]


def checked_task(directory: Path, options: TrialOptions) -> Task:
    """The task in `directory`, once it is known that it can be set up."""
    terminal.plan(terminal.load_task(directory), options)
    return terminal.harbor_task(directory)


# --- the warm start --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HastyPlayer(Demonstrator):
    """Types one command and hands in: the right one in a `right` share of the tasks, else a plausible mistake.

    names: of our own tasks of one step. instructions: the system message, the same as in training.
    """

    names: tuple[str, ...] = EASIEST
    right: float = 0.4
    own_tasks: str = "runs/terminal_tasks"
    instructions: str | None = None
    show_tools: bool = False
    output_bytes: int = 64

    def __post_init__(self) -> None:
        if not 0.0 <= self.right <= 1.0:
            raise ValueError(f"right={self.right}: expected a share, 0 <= right <= 1")

    def play(self, rng: np.random.Generator) -> Demonstration:
        """One episode. Each command is run once, in a sandbox, however often it is shown."""
        name = str(rng.choice(self.names))
        shown = shown_step(name)
        wrong = shown.mistakes[int(rng.integers(len(shown.mistakes)))]
        command = shown.solution if rng.random() < self.right else wrong
        options = TrialOptions(output_bytes=self.output_bytes)
        messages = _demonstrated(name, command.strip(), self.own_tasks, self.instructions, options)
        return Demonstration(messages, terminal.HarborEnv(show_tools=self.show_tools).tool_specs)


_SHOWN = 0  # the instance that is demonstrated


def shown_step(name: str) -> Step:
    """The only step of the instance of one of our own tasks that is demonstrated."""
    found = [each.steps(_SHOWN) for each in TASKS if each.name == name]
    if not found or len(found[0]) != 1:
        one_step = ", ".join(each.name for each in TASKS if len(each.steps(_SHOWN)) == 1)
        raise ValueError(f"names has {name!r}: expected one of our tasks of one step: {one_step}")
    return found[0][0]


@functools.cache
def _demonstrated(
    name: str, command: str, own_tasks: str, instructions: str | None, options: TrialOptions
) -> list[Message]:
    (directory,) = write_tasks(Path(own_tasks), seed=_SHOWN, names=[name])
    play = partial(terminal.demonstrate, directory, options, commands=[command], instructions=instructions)
    messages, _ = trio.run(play)
    return messages


DEFAULTS = {
    "dataset_builder": HarborDatasetBuilder(instructions=None, show_tools=False, output_bytes=64),
    "model_name": "tiny",
    "warm_start": WarmStart(HastyPlayer(), steps=45, batch_size=8, learning_rate=3e-3),
    "log_path": "runs/terminal_rl",
    "learning_rate": 1e-3,
    "lora": LoraConfig(rank=16, alpha=16.0),
    "optimizer": OptimizerConfig(max_grad_norm=100.0),
    "max_tokens": 112,
    "max_turns": 2,
    "rollout_strategy": MinViableGroup(),
    "eval_every": 20,
    "engine": EngineConfig(
        slots=16,
        context=384,
        prompts=0,
        prompt_context=1,
        decode_steps=16,
        extend_lengths=(64, 160),
        row_buckets=(16,),
        position_buckets=(384,),
    ),
    "packing": Packing(widths=(448,), rows=2),
    "remat": False,
}


def check_goes_together(config: Config) -> None:
    """Raise ValueError when the player of the warm start types into other tasks than those to train on."""
    data, player = config.dataset_builder, config.warm_start and config.warm_start.demonstrator
    if not isinstance(data, HarborDatasetBuilder) or not isinstance(player, HastyPlayer):
        return
    if data.tasks is not None:
        raise ValueError(f"dataset_builder.tasks={data.tasks}, but the warm start shows our own: set warm_start=None")
    check_same_settings(
        data,
        player,
        ("names", "instructions", "show_tools", "output_bytes"),
        "other tasks",
        "set both alike, or warm_start=None",
    )


if __name__ == "__main__":
    command(DEFAULTS, check=check_goes_together)
