"""A supervised start: a model learns the form of an episode from demonstrations before it learns to win.

Knows renderers, conversations and the learner. Trains all weights by cross-entropy on the assistant's tokens, in
the very contexts that rollouts will see; the reinforcement learning that follows adapts the result.
"""

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from jax.sharding import Mesh

from jaxrl.algo.loss import make_loss
from jaxrl.algo.objective import Objective
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.chat.renderer import Renderer
from jaxrl.chat.supervised import supervise, supervised_datum
from jaxrl.models.config import ModelConfig
from jaxrl.models.spec import Params
from jaxrl.runtime.learner import Learner, Packing
from jaxrl.runtime.log import MetricsLog, Progress
from jaxrl.settings import above_zero, at_least
from jaxrl.types import Datum, Message, ToolSpec


@dataclass(frozen=True)
class Demonstration:
    """A finished conversation, and the tools that were shown in it."""

    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()


class Demonstrator(abc.ABC):
    """Configuration of who demonstrates what."""

    @abc.abstractmethod
    def play(self, rng: np.random.Generator) -> Demonstration:
        """One conversation, a function of the generator alone."""


def check_same_settings(
    data: object, player: Demonstrator, names: Sequence[str], shown: str, advice: str = "set both alike"
) -> None:
    """Raise ValueError where a dataset builder and the player of its warm start differ in one of these settings.

    shown: what the warm start would show then, such as "another game".
    """
    for name in names:
        if getattr(data, name) != getattr(player, name):
            raise ValueError(
                f"dataset_builder.{name}={getattr(data, name)}, but warm_start.demonstrator.{name}="
                f"{getattr(player, name)}: the warm start would show {shown}; {advice}"
            )


TrainOn = Literal["all_assistant_messages", "last_assistant_message", "last_assistant_turn"]


@dataclass(frozen=True)
class WarmStart:
    """How long and how fast to learn from whom.

    batch_size: conversations a step. The learning rate climbs over a tenth of the steps and falls to zero.
    train_on: which of the assistant's messages are learned (`jaxrl.chat.supervised.TrainOnWhat`).
    """

    demonstrator: Demonstrator
    steps: int = 150
    batch_size: int = 64
    learning_rate: float = 3e-3
    train_on: TrainOn = "all_assistant_messages"

    def __post_init__(self) -> None:
        if not isinstance(self.demonstrator, Demonstrator):
            raise TypeError(f"warm_start.demonstrator={self.demonstrator!r:.80}: expected a Demonstrator")
        for name in ("steps", "batch_size"):
            at_least(f"warm_start.{name}", getattr(self, name), 1)
        above_zero("warm_start.learning_rate", self.learning_rate)
        if self.train_on not in get_args(TrainOn):
            raise ValueError(f"warm_start.train_on={self.train_on!r}: expected one of {', '.join(get_args(TrainOn))}")


def run_warm_start(
    config: WarmStart,
    model: ModelConfig,
    params: Params,
    renderer: Renderer,
    *,
    packing: Packing,
    seed: int,
    log: Path,
    remat: bool = True,
    mesh: Mesh | None = None,
    compute_dtype: Any = None,
    checkpoint: Callable[[], None] = lambda: None,
) -> Params:
    """The parameters after `config.steps` supervised steps, float32. Metrics go to the file `log`. Blocks.

    compute_dtype: of the forward passes, where it is not that of `params`.
    checkpoint: called before every step; it raises to stop (`trio.from_thread.check_cancelled`, in a thread of trio's).
    """
    optimizer = OptimizerConfig(
        learning_rate=config.learning_rate,
        schedule="cosine",
        warmup_steps=config.steps // 10,
        total_steps=config.steps,
    )
    learner = Learner(
        model,
        params,
        lora=None,
        objective=Objective(make_loss("cross_entropy"), "token_mean"),
        optimizer=optimizer,
        packing=packing,
        remat=remat,
        mesh=mesh,
        compute_dtype=compute_dtype,
    )
    batches = _batches(config, renderer, seed)
    with MetricsLog(log) as metrics_log, Progress(config.steps, label="warm start") as progress:
        for step in range(config.steps):
            checkpoint()
            metrics = learner.update(next(batches))
            metrics_log.write(step, metrics)
            progress.update(step, metrics)
    return learner.state.params


def _batches(config: WarmStart, renderer: Renderer, seed: int) -> Iterator[list[Datum]]:
    step = 0
    while True:
        rng = np.random.default_rng((seed, step))
        played = [_played(config.demonstrator, rng) for _ in range(config.batch_size)]
        yield [
            supervised_datum(sequence, episode=episode)
            for episode, shown in enumerate(played)
            for sequence in supervise(renderer, shown.messages, shown.tools, train_on=config.train_on)
        ]
        step += 1


def _played(demonstrator: Demonstrator, rng: np.random.Generator) -> Demonstration:
    shown = demonstrator.play(rng)
    if not isinstance(shown, Demonstration):
        raise TypeError(
            f"play of {type(demonstrator).__name__} returned {shown!r:.80}: expected a Demonstration of the messages"
        )
    return shown
