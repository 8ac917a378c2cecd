"""Games of textarena: what is refused needs no package; what is played is a pure function, and its traps are closed."""

import importlib.util
import random
from typing import Any

import numpy as np
import pytest

from envs import games, text_arena
from envs.text_arena import OFFLINE, REFUSED, Game, State, as_rules, candidates, position, random_player
from envs.text_arena import replay as replays
from jaxrl.env import EnvironmentFault

installed = pytest.mark.skipif(
    importlib.util.find_spec("textarena") is None, reason="needs textarena: pip install 'jaxrl[textarena]'"
)

TICTACTOE = "TicTacToe-v0"


def rules(name: str = TICTACTOE, **shown: Any) -> games.Rules[State]:
    return as_rules(Game(name, **shown), games.Rules, games.IllegalMove)


# --- without the package --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "teaches"),
    [
        ("TwentyQuestions-v0", "wants that service's key"),
        ("Wordle-v0-hardcore", "word lists that nltk downloads"),
        ("Chess-v0", "no Python 3.11"),
        ("Sokoban-v0", "not part of textarena"),
        ("IteratedRockPaperScissors-v0", "here a seat hears what the other moved"),
        ("SimpleNegotiation-v0", "a turn is one move in brackets"),
        ("GuessTheNumber-v0", "for one player"),
        ("Checquers-v0", "expected a variant of Alquerque, Battleship"),
        ("TicTacToe-v0-train", "without wrappers, such as TicTacToe-v0"),
        ("TicTacToe", "without wrappers, such as TicTacToe-v0"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused_with_the_reason_before_it_is_made(name: str, teaches: str) -> None:
    with pytest.raises(ValueError, match=teaches):
        Game(name)
    with pytest.raises(ValueError, match="starts=0: expected at least 1"):
        Game(TICTACTOE, starts=0)


def test_no_game_is_both_played_and_refused() -> None:
    assert not set(OFFLINE) & set(REFUSED)


@pytest.mark.skipif(importlib.util.find_spec("textarena") is not None, reason="textarena is installed")
def test_without_the_package_the_extra_is_named() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jaxrl\[textarena\]'"):
        rules()


# --- with the package -----------------------------------------------------------------------------


@pytest.mark.full
@installed
def test_N09_every_game_of_the_package_is_in_the_catalogue_and_every_offline_one_starts() -> None:
    registry = text_arena.require_textarena().envs.registration.ENV_REGISTRY
    assert {text_arena.family(name) for name in registry} == {*OFFLINE, *REFUSED}
    for game in OFFLINE:
        played = rules(f"{game}-v0", starts=1)
        match = games.begin(played, 0)
        assert match.rewards is None
        assert len(games.told(match, match.to_move)) > 50
    with pytest.raises(ValueError, match="has no game 'TicTacToe-v7'"):
        rules("TicTacToe-v7")


@pytest.mark.full
@installed
@pytest.mark.parametrize(
    "game", ["Briscola", "Chopsticks", "ConnectFour", "IndianPoker", "KuhnPoker", "Nim", "SimpleTak"]
)
def test_games_end_and_what_one_seat_wins_the_other_loses(game: str) -> None:
    played, rng = rules(f"{game}-v0"), np.random.default_rng(0)
    match = games.begin(played, 3)
    while not match.over:
        match = games.play(match, games.choose(random_player, match.state, rng))
    assert match.rewards is not None
    assert sum(match.rewards) == 0
    assert played.legal_moves(match.state) == ()


@pytest.mark.full
@installed
def test_N05_random_games_of_tic_tac_toe_end_as_ours_do() -> None:
    """A win with the last square included. Theirs counts cells from 0 and lets O begin."""
    ours, theirs, ends = games.TIC_TAC_TOE, rules(starts=1), set()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        mine, other = games.begin(ours, 0), games.begin(theirs, 0)
        while not mine.over:
            move = games.choose(games.random_player(ours), mine.state, rng)
            assert candidates(other.state) == tuple(str(int(m) - 1) for m in ours.legal_moves(mine.state))
            mine, other = games.play(mine, move), games.play(other, str(int(move) - 1))
        assert other.rewards == mine.rewards
        ends.add((len(mine.moves), mine.rewards))
    assert {(9, (1.0, -1.0)), (9, (0.0, 0.0))} <= ends


@pytest.mark.full
@installed
def test_N01_N03_a_bad_move_says_why_the_same_every_time_and_is_no_turn() -> None:
    match = games.begin(rules(starts=1), 0)
    after, complaint = games.say(match, "I think [9] is best")
    assert complaint == "[9] is not possible: 9. Must be between 0 and 8."
    assert games.say(match, "[9]")[1] == complaint
    assert (after.to_move, after.moves, after.unread) == (0, (), 1)
    good, complaint = games.say(after, "[4]")
    assert (complaint, good.to_move, good.moves, good.unread) == (None, 1, ((0, "4"),), 0)
    assert games.say(good, "[4]")[1] == "[4] is not possible: cell 4 is already occupied."
    lost, complaint = games.say(after, "[9]")
    assert (complaint, lost.rewards) == (None, (-1.0, 1.0))


@pytest.mark.full
@installed
@pytest.mark.parametrize(
    "text", ["", "well, " * 30, "[]", "[" + "9" * 50 + "]", "[\0]", "[-1]", "[²]", "[4][x]", "[Player 1]", "[[[[", "no"]
)
def test_what_is_no_move_is_refused_and_harmless(text: str) -> None:
    for name in (TICTACTOE, "ConnectFour-v0", "Nim-v0", "KuhnPoker-v0"):
        match = games.begin(rules(name, starts=1), 0)
        after, complaint = games.say(match, text)
        assert complaint
        assert len(complaint) < 300
        assert (after.moves, after.to_move) == ((), match.to_move)


@pytest.mark.full
@installed
def test_only_the_move_reaches_the_opponent() -> None:
    match = games.begin(rules(starts=1), 0)
    match, complaint = games.say(match, "My plan is a fork on 0 and 8, so [ 4 ]")
    assert complaint is None
    told = games.told(match, 1)
    assert "Opponent: 4\n" in told
    assert "placed their symbol (O) in cell 4." in told
    assert "plan" not in told
    assert "fork" not in told


@pytest.mark.full
@installed
def test_a_seat_sees_what_is_new_and_only_its_own_cards() -> None:
    match = games.begin(rules("KuhnPoker-v0"), 2)
    first, second = (match.rules.render(match.state, seat) for seat in (0, 1))
    assert first != second
    cards = [next(line for line in text.splitlines() if "Your card is" in line) for text in (first, second)]
    assert cards[0] != cards[1]
    assert cards[1] not in first
    match = games.play(games.play(games.begin(rules(starts=1), 0), "4"), "0")
    assert games.told(match, 0).count("Current Board") == 1
    assert "Tic Tac Toe" not in games.told(match, 0), "the prompt is shown once"


@pytest.mark.full
@installed
def test_a_bare_board_is_short_and_shows_everything() -> None:
    match = games.play(games.begin(rules(starts=1, board_only=True, squeeze=True), 0), "4")
    assert games.told(match, 1) == "TicTacToe-v0. You are player 1.\nOpponent: 4\n0|1|2\n3|O|5\n6|7|8"


@pytest.mark.full
@installed
def test_the_global_generator_is_neither_read_nor_changed_and_chance_follows_from_the_seed() -> None:
    told = {}
    for salt in (1, 2):
        random.seed(salt)
        before = random.getstate()
        position.cache_clear()
        match = games.begin(rules("KuhnPoker-v0"), 5)
        told[salt] = [match.rules.render(match.state, seat) for seat in (0, 1)]
        assert random.getstate() == before
    assert told[1] == told[2]
    deals = {position(State("KuhnPoker-v0", seed)).shown for seed in range(12)}
    assert len(deals) > 2


@pytest.mark.full
@installed
def test_the_role_names_that_all_games_of_the_package_share_stay_as_they_were() -> None:
    package = text_arena.require_textarena()
    default = package.TwoPlayerState.reset.__defaults__[2]
    before = dict(default)
    position.cache_clear()
    for game in OFFLINE:
        position(State(f"{game}-v0", 0))
    assert dict(default) == before


@pytest.mark.full
@installed
def test_a_game_that_pays_no_win_or_loss_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(TICTACTOE, 0, tuple("031425")[:5])
    monkeypatch.setattr(text_arena.require_textarena().TwoPlayerState, "set_winner", set_both_winners)
    position.cache_clear()
    with pytest.raises(EnvironmentFault, match=r"paid \{0: 1.0, 1: 1.0\}: expected a win of 1 and a loss of -1"):
        position(state)
    position.cache_clear()


def set_both_winners(self: Any, **_: Any) -> None:
    self.rewards, self.done = {0: 1, 1: 1}, True


@pytest.mark.full
@installed
def test_a_game_that_fails_at_a_move_it_took_before_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    assert position(State(TICTACTOE, 0, ("0", "1"))).invalid is None
    monkeypatch.setattr(replays, "BLUNDERS", (KeyError,))
    position.cache_clear()
    env = type(text_arena.require_textarena().make("TicTacToe-v0-raw"))
    monkeypatch.setattr(env, "step", failing)
    with pytest.raises(EnvironmentFault, match="TicTacToe-v0 failed at move 1, '0': KeyError"):
        position(State(TICTACTOE, 0, ("0", "1")))
    assert position(State(TICTACTOE, 0, ("0",))).invalid == "it could not be read"
    position.cache_clear()


def failing(self: Any, action: str) -> Any:
    raise KeyError(action)


@pytest.mark.full
@installed
def test_where_no_move_is_known_the_random_player_says_so() -> None:
    with pytest.raises(EnvironmentFault, match="no move of LinesOfAction-v0 is known"):
        random_player(State("LinesOfAction-v0", 0))
