"""Tic-tac-toe against oneself: both seats of a game are the policy's, and what one wins the other loses.

    python -m recipes.tictactoe_selfplay                        a tiny model, built and warm-started in place

    python -m recipes.tictactoe_selfplay dataset_builder.opponent=random loss_fn_config.advantage=mean
    python -m recipes.tictactoe_selfplay dataset_builder.opponent=past dataset_builder.past=a,b \\
        frozen_policies.a=runs/one frozen_policies.b=runs/two loss_fn_config.advantage=mean

In self-play a group is one game, its two members the two seats. They start from different sides of the board, so
neither is the other's baseline: each seat has a mean of its own, which moves with training (advantage=moving_baseline).
Against an opponent that does not learn, a group is several attempts at one game from one seat, which are compared with
each other (advantage=mean). Held-out games are against a random player and against one that cannot be beaten, from
both seats; a draw counts half, so nobody gets more than 0.5 against the latter.

The other games take the same fields: dataset_builder.game=nim warm_start.demonstrator.game=nim. Kuhn poker also needs
max_tokens=8, connect four max_turns=30 with an engine.context and packing.widths of 1280.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from envs import games
from jaxrl.algo.advantage import needs_peers
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.chat.renderer import Renderer
from jaxrl.env import EnvGroupBuilder, GroupDataset, RLDataset, RLDatasetBuilder
from jaxrl.models.lora import LoraConfig
from jaxrl.runtime.engine import EngineConfig
from jaxrl.runtime.learner import Packing
from jaxrl.runtime.message_env import EnvFromMessageEnv, TurnRules
from jaxrl.runtime.opponents import Frozen
from jaxrl.runtime.warm_start import Demonstration, Demonstrator, WarmStart, check_same_settings
from jaxrl.train import Config, command

RULES = TurnRules(failed_parse_reward=games.LOSS)
"""A turn whose framing is broken gives the game away, as two bad moves in a row do."""

CURRENT = "current"
"""In a pool of past policies, the one that is being trained, which is not frozen."""


@dataclass(frozen=True)
class Games(RLDatasetBuilder):
    """`batch_size` games a step against oneself; or as many groups of `group_size` games against somebody else.

    opponent: self; random; perfect, which plays at random in an `error_rate` of its moves; or past, which takes turns
    among the `past` policies, named as in frozen_policies, where "current" is the one in training. past_max_tokens: of
    their turns. test_games: held-out games against each of two players.
    """

    game: str = "tic_tac_toe"
    opponent: Literal["self", "random", "perfect", "past"] = "self"
    error_rate: float = 0.0
    past: tuple[str, ...] = ()
    past_max_tokens: int = 4
    batch_size: int = 32
    group_size: int = 8
    steps: int = 150
    test_games: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.game not in games.GAMES:
            raise ValueError(f"dataset_builder.game={self.game!r}: expected one of {', '.join(games.GAMES)}")
        check_past(self.opponent, self.past)
        if self.error_rate and self.opponent != "perfect":
            raise ValueError(f"error_rate={self.error_rate} has no effect on opponent={self.opponent}")

    async def __call__(self, renderer: Renderer) -> tuple[RLDataset, RLDataset | None]:
        """Fresh games every step; the same held-out games at every evaluation."""
        lift = partial(EnvFromMessageEnv, renderer=renderer, rules=RULES)
        count, rules = self.batch_size * self.steps, games.GAMES[self.game]
        train = tables(rules, lift, count, self.seed)
        if self.opponent != "self":
            train = duels(rules, lift, self._sides(renderer), count, self.group_size, self.seed)
        test = [
            games.DuelGroupBuilder(task, rules, games.scripted(strategy), lift, 1, (name,))
            for name, strategy in (("random", games.random_player(rules)), ("perfect", games.perfect_player(rules)))
            for task in games.tasks("test", self.test_games, rules, seed=self.seed)
        ]
        return GroupDataset(train, self.batch_size), GroupDataset(test, len(test)) if test else None

    def _sides(self, renderer: Renderer) -> list[tuple[str, games.MakeSide]]:
        """Who plays the other side, by name."""
        rules = games.GAMES[self.game]
        random, perfect = games.random_player(rules), games.perfect_player(rules)
        if self.opponent == "past":
            return past_sides(renderer, self.past, self.past_max_tokens)
        strategies = {"random": random, "perfect": games.mixed_player(perfect, random, self.error_rate)}
        return [(self.opponent, games.scripted(strategies[self.opponent]))]


def check_past(opponent: str, past: Sequence[str]) -> None:
    """Raise ValueError unless past policies are named where they play, and only there."""
    if (opponent == "past") != bool(past):
        raise ValueError(
            f"dataset_builder.opponent={opponent} with past={past}: name the policies that play, such as "
            "past=a,b, with opponent=past, and nobody else"
        )


def tables(rules: games.Rules, lift: games.Lift, count: int, seed: int) -> list[EnvGroupBuilder]:
    """Games against oneself."""
    drawn = games.tasks("train", count, rules, seats=(0,), seed=seed)
    return [games.TableGroupBuilder(rules, task.metadata["start"], lift) for task in drawn]


def duels(
    rules: games.Rules,
    lift: games.Lift,
    sides: Sequence[tuple[str, games.MakeSide]],
    count: int,
    group_size: int,
    seed: int,
) -> list[EnvGroupBuilder]:
    """Groups against each of `sides` in turn."""
    made: list[EnvGroupBuilder] = []
    for i, task in enumerate(games.tasks("train", count, rules, seed=seed)):
        name, side = sides[i % len(sides)]
        made.append(games.DuelGroupBuilder(task, rules, side, lift, group_size, (name,)))
    return made


def past_sides(renderer: Renderer, past: Sequence[str], max_tokens: int) -> list[tuple[str, games.MakeSide]]:
    """Past policies as the other side, by name."""
    make = partial(Frozen, renderer, max_tokens=max_tokens)
    adapters = {name: None if name == CURRENT else name for name in past}
    return [(name, games.conversing(partial(make, adapter=adapter))) for name, adapter in adapters.items()]


@dataclass(frozen=True)
class PoorPlayer(Demonstrator):
    """Plays a random move in an `error_rate` of its turns, else a perfect one, against another of its kind."""

    game: str = "tic_tac_toe"
    error_rate: float = 0.9

    def play(self, rng: np.random.Generator) -> Demonstration:
        """What one seat of one game said and heard."""
        rules = games.GAMES[self.game]
        player = games.mixed_player(games.perfect_player(rules), games.random_player(rules), self.error_rate)
        seat = int(rng.integers(2))
        shown = games.demonstrate(rules, (player, player), seat, rng)
        return Demonstration(shown or games.demonstrate(rules, (player, player), 0, rng))


DEFAULTS = {
    "dataset_builder": Games(),
    "model_name": "tiny",
    # long enough to know which cells are free: before that a game is lost by bad moves, whatever the good ones were
    "warm_start": WarmStart(PoorPlayer(), steps=200, batch_size=8, learning_rate=1e-3),
    "log_path": "runs/tictactoe_selfplay",
    "loss_fn_config.advantage": "moving_baseline",
    "loss_fn_config.entropy": "fixed",
    "loss_fn_config.entropy_coef": 0.02,
    "learning_rate": 2e-4,
    "lora": LoraConfig(rank=16, alpha=16.0),
    "optimizer": OptimizerConfig(max_grad_norm=100.0),
    "max_tokens": 4,
    "max_turns": 10,
    "eval_every": 25,
    "engine": EngineConfig(
        slots=64,
        context=320,
        prompts=0,
        prompt_context=1,
        decode_steps=4,
        extend_lengths=(40, 80),
        row_buckets=(32,),  # of two seats one is to move
        position_buckets=(320,),
    ),
    "packing": Packing(widths=(320,), rows=2),
    "remat": False,
}


def check_goes_together(config: Config) -> None:
    """Raise ValueError for a warm start of another game, or an advantage that compares what cannot be compared."""
    data, player = config.dataset_builder, config.warm_start and config.warm_start.demonstrator
    if not isinstance(data, Games):
        return
    if isinstance(player, PoorPlayer):
        check_same_settings(data, player, ("game",), "another game")
    check_opponent(config, data.opponent, data.past)


def check_opponent(config: Config, opponent: str, past: Sequence[str]) -> None:
    """Raise ValueError for an advantage that compares what cannot be compared, or a past policy that nobody named."""
    advantage = config.loss_fn_config.get("advantage")
    if opponent == "self" and (advantage is None or needs_peers(str(advantage))):
        raise ValueError(
            "dataset_builder.opponent=self: a group is the two seats of one game, whose rewards always sum to zero, so "
            "neither is a baseline of the other; set loss_fn_config.advantage=moving_baseline"
        )
    if opponent != "self" and advantage == "moving_baseline" and config.loss_fn_config.get("role") != "tags":
        raise ValueError(
            f"dataset_builder.opponent={opponent}: a group is several attempts from one seat, which are each "
            "other's baseline; set loss_fn_config.advantage=mean"
        )
    if opponent == "past":
        unknown = sorted(set(past) - {*config.frozen_policies, CURRENT})
        if unknown:
            raise ValueError(
                f"dataset_builder.past names {', '.join(unknown)}, which frozen_policies does not: give "
                f"frozen_policies.{unknown[0]}=<run directory>"
            )


if __name__ == "__main__":
    command(DEFAULTS, check=check_goes_together)
