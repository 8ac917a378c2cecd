"""Twenty questions: a model finds out what thing is meant, and RL teaches it to ask what halves what is left.

    python -m recipes.twenty_questions                        a tiny model, built and warm-started in place

    python -m recipes.twenty_questions model_name=<model> warm_start=None dataset_builder.things=None \\
        dataset_builder.turns=20 max_turns=20 max_tokens=64 engine.context=2048 packing=None learning_rate=1e-4
    ... dataset_builder.answerer_url=https://api.example.com/v1 dataset_builder.answerer_model=<name>

The table answers by default, exactly and for nothing; with answerer_url any OpenAI-compatible model does. The tiny
model plays with eight things and six turns. Its warm start shows a player that asks the best question in some turns
and says anything in the others, so the form is known, and winning is not.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from envs import twenty_questions
from envs.twenty_questions import THINGS
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.chat.renderer import Renderer
from jaxrl.env import RLDataset, RLDatasetBuilder
from jaxrl.models.lora import LoraConfig
from jaxrl.runtime.engine import EngineConfig
from jaxrl.runtime.learner import Packing
from jaxrl.runtime.message_env import MessageEnvDataset
from jaxrl.runtime.opponents import Hosted
from jaxrl.runtime.warm_start import Demonstration, Demonstrator, WarmStart, check_same_settings
from jaxrl.train import Config, command


def chosen_things(things: int | None) -> tuple[str, ...]:
    """So many things from all over the table; None is all of them."""
    if things is None:
        return THINGS
    if not 1 <= things <= len(THINGS):
        raise ValueError(f"things={things}: expected 1 to {len(THINGS)}, or None for all of them")
    return tuple(THINGS[i * len(THINGS) // things] for i in range(things))


@dataclass(frozen=True)
class TwentyQuestions(RLDatasetBuilder):
    """`batch_size` secrets a step, `group_size` games a secret, `test_games` held out.

    things: how many secrets there are; None is the whole table. cost: what a turn takes off the reward. answerer_url,
    answerer_model: an endpoint that answers instead of the table. answerer_key_env: the variable that holds its key.
    """

    things: int | None = 8
    turns: int = 6
    cost: float = twenty_questions.COST
    batch_size: int = 8
    group_size: int = 8
    steps: int = 150
    test_games: int = 64
    seed: int = 0
    answerer_url: str | None = None
    answerer_model: str | None = None
    answerer_key_env: str | None = None

    def __post_init__(self) -> None:
        if (self.answerer_url is None) != (self.answerer_model is None):
            raise ValueError(
                f"answerer_url={self.answerer_url!r} with answerer_model={self.answerer_model!r}: an endpoint needs "
                "both, and the table neither"
            )
        if self.answerer_key_env is not None and self.answerer_url is None:
            raise ValueError("answerer_key_env has no effect: the table answers; give answerer_url, or leave it out")

    async def __call__(self, renderer: Renderer) -> tuple[RLDataset, RLDataset | None]:
        """Fresh games every step; the same held-out games at every evaluation."""
        game = {"things": chosen_things(self.things), "turns": self.turns, "seed": self.seed}
        train = twenty_questions.tasks("train", self.batch_size * self.steps, **game)
        test = twenty_questions.tasks("test", self.test_games, **game)
        make_env = partial(twenty_questions.make_env, answerer=self._answerer(), cost=self.cost)
        return (
            MessageEnvDataset(train, make_env, renderer, self.batch_size, self.group_size),
            MessageEnvDataset(test, make_env, renderer, self.test_games, 1) if test else None,
        )

    def _answerer(self) -> twenty_questions.MakeAnswerer:
        if self.answerer_url is None or self.answerer_model is None:
            return twenty_questions.TableAnswerer
        hosted = partial(Hosted, self.answerer_url, self.answerer_model, self.answerer_key_env, temperature=0.0)
        return twenty_questions.answered_by(hosted)


@dataclass(frozen=True)
class PoorPlayer(Demonstrator):
    """Asks what splits best in a `strength` of its turns, and anything in the others."""

    things: int | None = 8
    turns: int = 6
    strength: float = 0.5

    def play(self, rng: np.random.Generator) -> Demonstration:
        """One game with a random secret."""
        things = chosen_things(self.things)
        (task,) = twenty_questions.tasks("train", 1, things=things, turns=self.turns, seed=int(rng.integers(2**31)))
        player = twenty_questions.mixed_player(self.strength, things)
        return Demonstration(twenty_questions.demonstrate(task, player, rng))


DEFAULTS = {
    "dataset_builder": TwentyQuestions(),
    "model_name": "tiny",
    "warm_start": WarmStart(PoorPlayer(), steps=80, batch_size=8, learning_rate=1e-3),
    "log_path": "runs/twenty_questions",
    "learning_rate": 1e-3,
    "lora": LoraConfig(rank=16, alpha=16.0),
    "optimizer": OptimizerConfig(max_grad_norm=100.0),
    "max_tokens": 24,
    "max_turns": 6,
    "eval_every": 25,
    "engine": EngineConfig(
        slots=64,
        context=272,
        prompts=0,
        prompt_context=1,
        decode_steps=8,
        extend_lengths=(16, 64),
        row_buckets=(64,),
        position_buckets=(272,),
    ),
    "packing": Packing(widths=(272,), rows=2),
    "remat": False,
}


def check_goes_together(config: Config) -> None:
    """Raise ValueError when the player shown in the warm start plays another game than the one to train."""
    data, player = config.dataset_builder, config.warm_start and config.warm_start.demonstrator
    if isinstance(data, TwentyQuestions) and isinstance(player, PoorPlayer):
        check_same_settings(data, player, ("things", "turns"), "another game")


if __name__ == "__main__":
    command(DEFAULTS, check=check_goes_together)
