"""Guess the number: a model asks, the game answers higher or lower, and RL teaches it to halve what is left.

    python -m recipes.guess_number                        a tiny model, built and warm-started in place
    python -m recipes.guess_number model_name=<model> warm_start=None learning_rate=1e-4

The warm start imitates a poor player, who halves what is left in some turns and stubbornly names the top of the range
in the others. So the form of the game is known, and winning is not; what held-out success gains is the work of RL.
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
from jaxrl.runtime.warm_start import Demonstration, Demonstrator, WarmStart, check_same_settings
from jaxrl.train import Config, command


@dataclass(frozen=True)
class GuessNumber(RLDatasetBuilder):
    """Games of one size: `batch_size` secrets a step, `group_size` games a secret, `test_games` held out."""

    high: int = 15
    turns: int = 7
    batch_size: int = 16
    group_size: int = 8
    steps: int = 150
    test_games: int = 128
    seed: int = 0

    async def __call__(self, renderer: Renderer) -> tuple[RLDataset, RLDataset | None]:
        """Fresh games every step; the same held-out games at every evaluation."""
        game = {"high": self.high, "turns": self.turns, "seed": self.seed}
        train = guess_number.tasks("train", self.batch_size * self.steps, **game)
        test = guess_number.tasks("test", self.test_games, **game)
        make_env = guess_number.make_env
        held_out = MessageEnvDataset(test, make_env, renderer, self.test_games, 1) if test else None
        return MessageEnvDataset(train, make_env, renderer, self.batch_size, self.group_size), held_out


@dataclass(frozen=True)
class PoorPlayer(Demonstrator):
    """Bisects in a `strength` of its turns, and names the top of the range in the others."""

    high: int = 15
    turns: int = 7
    strength: float = 0.3

    def play(self, rng: np.random.Generator) -> Demonstration:
        """One game with a random secret."""
        seed = int(rng.integers(2**31))
        (task,) = guess_number.tasks("train", 1, high=self.high, turns=self.turns, seed=seed)
        player = guess_number.mixed_player(self.strength, weak=guess_number.stubborn_player)
        return Demonstration(guess_number.demonstrate(task, player, rng))


DEFAULTS = {
    "dataset_builder": GuessNumber(),
    "model_name": "tiny",
    "warm_start": WarmStart(PoorPlayer(), steps=118, batch_size=16, learning_rate=1e-3),
    "log_path": "runs/guess_number",
    "learning_rate": 1e-3,
    "lora": LoraConfig(rank=16, alpha=16.0),
    "optimizer": OptimizerConfig(max_grad_norm=100.0),  # a batch with one group to learn from takes a small step
    "max_tokens": 8,
    "max_turns": 8,
    "eval_every": 20,
    "engine": EngineConfig(
        slots=128,
        context=129,
        prompts=0,  # twenty tokens are not worth programs of their own
        prompt_context=1,
        decode_steps=8,
        extend_lengths=(16, 32),
        row_buckets=(128,),
        position_buckets=(129,),
    ),
    "packing": Packing(widths=(128,), rows=16),
    "remat": False,
}


def check_goes_together(config: Config) -> None:
    """Raise ValueError when the player shown in the warm start plays another game than the one to train."""
    data, player = config.dataset_builder, config.warm_start and config.warm_start.demonstrator
    if isinstance(data, GuessNumber) and isinstance(player, PoorPlayer):
        check_same_settings(data, player, ("high", "turns"), "another game")


if __name__ == "__main__":
    command(DEFAULTS, check=check_goes_together)
