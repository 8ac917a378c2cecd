"""The two-player games of the package textarena that run offline, as rules that `envs.games` can play."""

from envs.text_arena.catalogue import OFFLINE, REFUSED, checked_name, family
from envs.text_arena.game import Game, as_rules, candidates, random_player
from envs.text_arena.replay import Position, State, position, require_textarena

__all__ = [
    "OFFLINE",
    "REFUSED",
    "Game",
    "Position",
    "State",
    "as_rules",
    "candidates",
    "checked_name",
    "family",
    "position",
    "random_player",
    "require_textarena",
]
