"""A two-player game of textarena against oneself, a random player, or past policies (pip install 'jaxrl[textarena]').

    python -m recipes.text_arena                        a tiny model, built and warm-started in place: TicTacToe-v0

    python -m recipes.text_arena dataset_builder.opponent=random loss_fn_config.advantage=mean
    python -m recipes.text_arena dataset_builder.opponent=past dataset_builder.past=a,b \\
        frozen_policies.a=runs/one frozen_policies.b=runs/two loss_fn_config.advantage=mean
    python -m recipes.text_arena model_name=<model> warm_start=None dataset_builder.game=KuhnPoker-v0 packing=None \\
        dataset_builder.board_only=False dataset_builder.squeeze=False max_tokens=64 max_turns=40 engine.context=4096

The seats, the opponents, what becomes of bad moves and the settings are those of recipes/tictactoe_selfplay.py; the
games come from the package, as envs/text_arena makes rules of them. Held-out games are against a random player, from
both seats. The tiny model sees bare boards only; a pretrained one needs the prompt and the list of moves: see the last
line above.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from envs import games, text_arena
from jaxrl.chat.renderer import Renderer
from jaxrl.env import GroupDataset, RLDataset, RLDatasetBuilder
from jaxrl.runtime.message_env import EnvFromMessageEnv, TurnRules
from jaxrl.runtime.warm_start import Demonstration, Demonstrator, check_same_settings
from jaxrl.train import Config, command
from recipes.tictactoe_selfplay import DEFAULTS as SELF_PLAY
from recipes.tictactoe_selfplay import check_opponent, check_past, duels, past_sides, tables


def rules_of(game: text_arena.Game) -> games.Rules:
    """The game as `envs.games` plays it. ModuleNotFoundError, naming the extra, without the package."""
    return text_arena.as_rules(game, games.Rules, games.IllegalMove)


@dataclass(frozen=True)
class TextArena(RLDatasetBuilder):
    """`batch_size` games a step against oneself; or as many groups of `group_size` games against somebody else.

    game: a registered name without the suffix of a wrapper. starts: how many seeds it starts from. board_only: show no
    prompt; squeeze: show no titles, no lists of moves, no padding of a board. opponent: self, random, or past, which
    takes turns among the `past` policies, named as in frozen_policies, where "current" is the one in training.
    past_max_tokens: of their turns. test_games: held-out games against a random player.
    """

    game: str = "TicTacToe-v0"
    starts: int = 16
    board_only: bool = True
    squeeze: bool = True
    opponent: Literal["self", "random", "past"] = "self"
    past: tuple[str, ...] = ()
    past_max_tokens: int = 4
    batch_size: int = 32
    group_size: int = 8
    steps: int = 150
    test_games: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        self.shown()
        check_past(self.opponent, self.past)

    def shown(self) -> text_arena.Game:
        """The game, and how it is shown."""
        return text_arena.Game(self.game, self.starts, self.board_only, self.squeeze)

    async def __call__(self, renderer: Renderer) -> tuple[RLDataset, RLDataset | None]:
        """Fresh games every step; the same held-out games at every evaluation."""
        rules = rules_of(self.shown())
        if (self.opponent == "random" or self.test_games) and not text_arena.candidates(rules.starts[0]):
            raise ValueError(
                f"dataset_builder.game={self.game}: it lists no moves, so nobody plays it at random; play it "
                "against self or past, with dataset_builder.test_games=0"
            )
        lift = partial(EnvFromMessageEnv, renderer=renderer, rules=TurnRules(failed_parse_reward=games.LOSS))
        count, random = self.batch_size * self.steps, games.scripted(text_arena.random_player)
        train = tables(rules, lift, count, self.seed)
        if self.opponent != "self":
            train = duels(rules, lift, self._sides(renderer), count, self.group_size, self.seed)
        test = [
            games.DuelGroupBuilder(task, rules, random, lift, 1, ("random",))
            for task in games.tasks("test", self.test_games, rules, seed=self.seed)
        ]
        return GroupDataset(train, self.batch_size), GroupDataset(test, len(test)) if test else None

    def _sides(self, renderer: Renderer) -> list[tuple[str, games.MakeSide]]:
        """Who plays the other side, by name."""
        if self.opponent == "random":
            return [("random", games.scripted(text_arena.random_player))]
        return past_sides(renderer, self.past, self.past_max_tokens)


@dataclass(frozen=True)
class RandomPlayer(Demonstrator):
    """Knows the form of the game, and moves at random, against another of its kind."""

    game: str = "TicTacToe-v0"
    starts: int = 16
    board_only: bool = True
    squeeze: bool = True

    def play(self, rng: np.random.Generator) -> Demonstration:
        """What one seat of one game said and heard."""
        rules = rules_of(text_arena.Game(self.game, self.starts, self.board_only, self.squeeze))
        players, seat = (text_arena.random_player, text_arena.random_player), int(rng.integers(2))
        return Demonstration(games.demonstrate(rules, players, seat, rng) or games.demonstrate(rules, players, 0, rng))


DEFAULTS = {
    **SELF_PLAY,
    "dataset_builder": TextArena(),
    "warm_start": replace(SELF_PLAY["warm_start"], demonstrator=RandomPlayer()),
    "log_path": "runs/text_arena",
}


def check_goes_together(config: Config) -> None:
    """Raise ValueError for a warm start of another game, or an advantage that compares what cannot be compared."""
    data, player = config.dataset_builder, config.warm_start and config.warm_start.demonstrator
    if not isinstance(data, TextArena):
        return
    if isinstance(player, RandomPlayer):
        check_same_settings(data, player, ("game", "starts", "board_only", "squeeze"), "another game")
    check_opponent(config, data.opponent, data.past)


if __name__ == "__main__":
    command(DEFAULTS, check=check_goes_together)
