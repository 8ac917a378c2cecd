"""A run of a few seconds: a model that says a few bytes a turn, and a game that likes some bytes better than others.

As a program it starts such a run and dies in the middle, without a chance to tidy up:

    python tests/small_run.py MODEL LOG_PATH STEP
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from compiling import compile_quickly

from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.env import MessageEnv, MessageStepResult
from jaxrl.models import spec
from jaxrl.models.config import ModelConfig
from jaxrl.models.lora import LoraConfig
from jaxrl.runtime.engine import EngineConfig
from jaxrl.runtime.learner import Packing
from jaxrl.runtime.log import MetricsLog
from jaxrl.runtime.policy import save_policy
from jaxrl.runtime.warm_start import Demonstration, Demonstrator, WarmStart
from jaxrl.train import Config, TaskDatasets, main
from jaxrl.types import Message, Task

BYTES = byte_tokenizer()
TASKS = tuple(Task(f"Say {i}.") for i in range(20))
HELD_OUT = tuple(Task(f"Tell {i}.") for i in range(3))


class Late(MessageEnv):
    """Two turns, each rewarded by the share of its letters that come late in the alphabet."""

    def __init__(self) -> None:
        self._messages: list[Message] = []

    async def reset(self, task: Task) -> Sequence[Message]:
        self._messages = [Message("user", task.prompt)]
        return tuple(self._messages)

    async def step(self, message: Message) -> MessageStepResult:
        self._messages += [message, Message("user", "on")]
        share = sum(c > "m" for c in message.content) / max(len(message.content), 1)
        if len(self._messages) == 5:
            return MessageStepResult(terminated=True, reward=share, metrics={"success": float(share > 0.5)})
        return MessageStepResult(messages=self._messages[-1:], reward=share)

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)


def make_late(task: Task) -> Late:
    """The env factory."""
    return Late()


@dataclass(frozen=True)
class Alphabet(Demonstrator):
    """Says one late letter a turn."""

    first: int = ord("n")

    def play(self, rng: np.random.Generator) -> Demonstration:
        said = [Message("assistant", chr(int(c))) for c in rng.integers(self.first, ord("z") + 1, 2)]
        return Demonstration([Message("user", "Say 1."), said[0], Message("user", "on"), said[1]])


WARM = WarmStart(Alphabet(), steps=3, batch_size=4)


def write_model(folder: Path) -> str:
    """A directory with a random model that ends a turn after a few bytes: channel 0 works as a bias of the head."""
    model = ModelConfig(BYTES.vocab_size, 32, 48, layers=1, heads=2, kv_heads=1, head_width=16, max_positions=256)
    params = spec.init(spec.param_specs(model), jnp.float32, seed=0)
    params["embed"] = params["embed"].at[:, 0].set(6.0)
    params["lm_head"] = params["lm_head"].at[0, 256:].set(-8.0).at[0, BYTES.special("<|im_end|>")].set(1.2)
    save_policy(folder, model, params, "tiny")
    return str(folder)


def small(model: str, log_path: Path, **changes: Any) -> Config:
    """A configuration in which everything is small; a dict for `data` changes the dataset."""
    data: Mapping[str, Any] = {"tasks": TASKS, "env_factory": make_late, "val_tasks": HELD_OUT, "batch_size": 2}
    settings: dict[str, Any] = {
        "model_name": model,
        "dataset_builder": TaskDatasets(**{**data, "group_size": 3, **changes.pop("data", {})}),
        "log_path": str(log_path),
        "behavior_if_log_dir_exists": "raise",
        "max_steps": 4,
        "learning_rate": 1e-2,
        "optimizer": OptimizerConfig(schedule="cosine", warmup_steps=1),
        "lora": LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "down_proj")),
        "max_tokens": 8,
        "max_turns": 3,
        "eval_every": 2,
        "save_every": 2,
        "engine": EngineConfig(
            slots=8,
            context=64,
            prompts=4,
            prompt_context=32,
            members=4,
            decode_steps=4,
            extend_lengths=(32,),
            row_buckets=(8,),
            position_buckets=(64,),
        ),
        "packing": Packing((64,), 4),
    }
    return Config(**{**settings, **changes})


if __name__ == "__main__":
    compile_quickly()  # as in the tests, or it would not be the same run to the last bit
    model, log_path, last = sys.argv[1:]
    write = MetricsLog.write

    def die(self: MetricsLog, step: int, metrics: Mapping[str, Any]) -> None:
        """The worst moment: a step's metrics are on disk, its checkpoint is not."""
        write(self, step, metrics)
        if step == int(last) and self.path.parent == Path(log_path):  # the warm start has a log too
            os._exit(9)

    MetricsLog.write = die
    main(small(model, Path(log_path), warm_start=WARM))
