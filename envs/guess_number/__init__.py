"""Guess a secret number from "higher" and "lower": the smallest game in which several turns matter."""

from envs.guess_number.game import GuessNumberEnv, make_env, opening, read_guess
from envs.guess_number.players import (
    Player,
    bisecting_player,
    demonstrate,
    mixed_player,
    random_player,
    stubborn_player,
)
from envs.guess_number.tasks import Split, tasks

__all__ = [
    "GuessNumberEnv",
    "Player",
    "Split",
    "bisecting_player",
    "demonstrate",
    "make_env",
    "mixed_player",
    "opening",
    "random_player",
    "read_guess",
    "stubborn_player",
    "tasks",
]
