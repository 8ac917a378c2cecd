"""Which games of textarena can be played here, by name, and why the others cannot.

Knows names and moves as text; must not know the package. Refusing happens before the package is asked: some of its
games look for keys, or try to download word lists, as soon as they are made.
"""

import itertools
from collections.abc import Mapping

_CELLS = tuple(f"{column}{row}" for column in "abcdefgh" for row in range(1, 9))
_SQUARES = tuple(range(9))

OFFLINE: Mapping[str, tuple[str, ...]] = {
    "Alquerque": (),
    "Battleship": tuple(f"{row}{column}" for row in "ABCDE" for column in range(5)),
    "Breakthrough": tuple(
        f"{a}{b}" for a, b in itertools.product(_CELLS, repeat=2) if abs(ord(a[0]) - ord(b[0])) < 2 and a[1] != b[1]
    ),
    "Briscola": tuple(f"play {card}" for card in (1, 2, 3)),
    "Chopsticks": (
        *(f"attack {mine} {other}" for mine in (0, 1) for other in (0, 1)),
        *(f"split {left} {right}" for left in range(5) for right in range(5)),
    ),
    "ConnectFour": tuple(f"col {column}" for column in range(12)),
    "Crusade": (),
    "GermanWhist": tuple(f"play {card}" for card in range(1, 14)),
    "Golf": ("draw", "take", "discard", *(f"swap {row} {column}" for row in range(2) for column in range(3))),
    "IndianPoker": (),
    "KuhnPoker": (),
    "LinesOfAction": (),
    "MemoryGame": tuple(" ".join(map(str, place)) for place in itertools.product(range(4), repeat=4)),
    "Nim": tuple(f"{pile} {taken}" for pile in range(5) for taken in range(1, 10)),
    "Othello": (),
    "PigDice": (),
    "QuantumTicTacToe": tuple(f"{a},{b}" for a, b in itertools.combinations(_SQUARES, 2)),
    "SimpleTak": (),
    "Tak": (),
    "TicTacToe": (),
    "UltimateTicTacToe": tuple(f"{board} {cell}" for board in _SQUARES for cell in _SQUARES),
    "WildTicTacToe": (),
}
"""The games that can be played. Of each the moves that it may allow and does not list on its board, for players who
only move at random."""

_KEY = "it asks a hosted model, and wants that service's key as soon as it is made"
_WORDS = "it needs word lists that nltk downloads"
_PYTHON = "its code is no Python 3.11"
_FILES = "files or packages that it needs are not part of textarena"
_SECRET = "its players move at the same time or in secret, and here a seat hears what the other moved"
_TALK = "its players talk, and here a turn is one move in brackets"
_SEATS = "it is for one player, or for more than two"

REFUSED: Mapping[str, str] = {
    game: reason
    for reason, games in {
        _KEY: "Debate GuessWho ScenarioPlanning TwentyQuestions",
        _WORDS: "Codenames DontSayIt Hangman LetterAuction SpellingBee Taboo WordChains WordLadder WordSearch Wordle",
        _PYTHON: "Checkers Chess IteratedStagHunt Klondike ReverseTicTacToe UltimateTexasHoldem",
        _FILES: "BabyAiText ScorableGames Sokoban UsedCar UsedCarNegotiation",
        _SECRET: (
            "ColonelBlotto GameOfPureStrategy HighSociety IteratedMatchingPennies "
            "IteratedPrisonersDilemma IteratedRockPaperScissors IteratedTwoThirdsAverage IteratedUltimatumGame "
            "LiarsDice MarketEntryGame Poker PublicGoodsGame SantoriniBaseFixed SimpleBlindAuction Snake "
            "SpiteAndMalice Stratego Surround"
        ),
        _TALK: "NewRecruit SimpleNegotiation TruthAndDeception TwoDollar",
        _SEATS: (
            "2048 Bandit Blackjack CharacterConclave Countdown Crosswords Cryptarithm FifteenPuzzle "
            "FrozenLake GuessTheNumber LightsOut LogicPuzzle Mastermind Minesweeper PegJump "
            "RushHour SecretMafia Secretary Set SettlersOfCatan Slitherlink Sudoku ThreeCardMonte ThreePlayerGOPS "
            "ThreePlayerIPD ThreePlayerTicTacToe TowerOfHanoi"
        ),
    }.items()
    for game in games.split()
}
"""The games that cannot, and why. GuessTheNumber would also pay a share of the reward for a loss; `envs.guess_number`
is the same game, and does not."""


def family(name: str) -> str:
    """The game of which `name` is a variant."""
    return name.partition("-v")[0]


def checked_name(name: str) -> str:
    """`name`, when its game can be played here. ValueError says why not, or what there is."""
    game = family(name)
    if game in REFUSED:
        raise ValueError(f"textarena's {name} cannot be played here: {REFUSED[game]}")
    if game not in OFFLINE:
        raise ValueError(f"game={name!r}: expected a variant of {', '.join(OFFLINE)}, such as TicTacToe-v0")
    if not name.startswith(f"{game}-v") or name.endswith(("-raw", "-train")):
        raise ValueError(f"game={name!r}: expected the name of a variant without wrappers, such as {game}-v0")
    return name
