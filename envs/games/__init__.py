"""Games of two seats as pure rules, played by a model against itself, a strategy, or anyone who answers messages."""

from envs.games.connect_four import CONNECT_FOUR
from envs.games.demonstration import demonstrate
from envs.games.duel import Duel, DuelGroupBuilder, duel
from envs.games.kuhn_poker import KUHN_POKER
from envs.games.match import LOSS, Match, begin, forfeit, measured, play, say, told
from envs.games.nim import NIM, nim
from envs.games.perfect import kuhn_equilibrium, minimax, perfect_player
from envs.games.players import Strategy, choose, expected, mixed_player, random_player
from envs.games.rules import SEATS, IllegalMove, Move, Payoffs, Rules
from envs.games.seat import Seat, TableGroupBuilder
from envs.games.side import MakeSide, Opponent, Side, conversing, scripted
from envs.games.tasks import Split, tasks
from envs.games.tic_tac_toe import TIC_TAC_TOE
from envs.games.unplayed import Lift, SkipsUnplayed

GAMES = {rules.name: rules for rules in (TIC_TAC_TOE, CONNECT_FOUR, NIM, KUHN_POKER)}
"""Every game by its name."""

__all__ = [
    "CONNECT_FOUR",
    "GAMES",
    "KUHN_POKER",
    "LOSS",
    "NIM",
    "SEATS",
    "TIC_TAC_TOE",
    "Duel",
    "DuelGroupBuilder",
    "IllegalMove",
    "Lift",
    "MakeSide",
    "Match",
    "Move",
    "Opponent",
    "Payoffs",
    "Rules",
    "Seat",
    "Side",
    "SkipsUnplayed",
    "Split",
    "Strategy",
    "TableGroupBuilder",
    "begin",
    "choose",
    "conversing",
    "demonstrate",
    "duel",
    "expected",
    "forfeit",
    "kuhn_equilibrium",
    "measured",
    "minimax",
    "mixed_player",
    "nim",
    "perfect_player",
    "play",
    "random_player",
    "say",
    "scripted",
    "tasks",
    "told",
]
