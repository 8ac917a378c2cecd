"""Guess the number: a model asks, the game answers higher or lower, and RL teaches it to halve what is left.

    python -m recipes.guess_number                        a tiny model, built and warm-started in place
    python -m recipes.guess_number model_name=<model> warm_start=None learning_rate=1e-4

The warm start imitates a poor player (mostly random guesses), so the form of the game is known and the way to win
is not; what the held-out success gains after it is the work of RL.
"""

from dataclasses import dataclass

import numpy as np

from envs import guess_number
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.chat.renderer import Renderer
from jaxrl.env import RLDataset, RLDatasetBuilder
from jaxrl.models.lora import LoraConfig
from jaxrl.runtime.engine import EngineConfig
from jaxrl.runtime.learner import Packing
from jaxrl.runtime.message_env import MessageEnvDataset
from jaxrl.runtime.warm_start import Demonstration, Demonstrator, WarmStart
from jaxrl.train import command


@dataclass(frozen=True)
class GuessNumber(RLDatasetBuilder):
    """Games of one size: `batch_size` secrets a step, `group_size` games a secret, `test_games` held out."""

    high: int = 32
    turns: int = 6
    batch_size: int = 16
    group_size: int = 8
    steps: int = 60
    test_games: int = 128
    seed: int = 0

    async def __call__(self, renderer: Renderer) -> tuple[RLDataset, RLDataset | None]:
        """Fresh games every step; the same held-out games at every evaluation."""
        game = {"high": self.high, "turns": self.turns, "seed": self.seed}
        train = guess_number.tasks("train", self.batch_size * self.steps, **game)
        test = guess_number.tasks("test", self.test_games, **game)
        make_env = guess_number.make_env
        return (
            MessageEnvDataset(train, make_env, renderer, self.batch_size, self.group_size),
            MessageEnvDataset(test, make_env, renderer, self.test_games, 1),
        )


@dataclass(frozen=True)
class PoorPlayer(Demonstrator):
    """Plays like a beginner: bisects a `strength` of its turns, guesses anything in the range in the others."""

    high: int = 32
    turns: int = 6
    strength: float = 0.25

    def play(self, rng: np.random.Generator) -> Demonstration:
        """One game with a random secret."""
        seed = int(rng.integers(2**31))
        (task,) = guess_number.tasks("train", 1, high=self.high, turns=self.turns, seed=seed)
        return Demonstration(guess_number.demonstrate(task, guess_number.mixed_player(self.strength), rng))


DEFAULTS = {
    "dataset_builder": GuessNumber(),
    "model_name": "tiny",
    "warm_start": WarmStart(PoorPlayer()),
    "log_path": "runs/guess_number",
    "learning_rate": 2e-3,
    "lora": LoraConfig(rank=16, alpha=16),
    "optimizer": OptimizerConfig(),
    "max_tokens": 8,
    "max_turns": 8,
    "eval_every": 10,
    "engine": EngineConfig(
        slots=128,
        context=256,
        prompts=16,
        prompt_context=64,
        decode_steps=8,
        extend_lengths=(32, 64),
        row_buckets=(32,),
        position_buckets=(128,),
    ),
    "packing": Packing(widths=(192, 256), rows=16),
}

if __name__ == "__main__":
    command(**DEFAULTS)
