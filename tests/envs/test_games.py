"""Four games as pure rules: known counts, brute force, and players that cannot be beaten."""

import functools
import itertools
import pickle
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from operator import xor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.games import (
    CONNECT_FOUR,
    GAMES,
    KUHN_POKER,
    NIM,
    TIC_TAC_TOE,
    IllegalMove,
    Rules,
    Strategy,
    choose,
    expected,
    kuhn_equilibrium,
    minimax,
    mixed_player,
    nim,
    perfect_player,
    random_player,
)
from envs.games.connect_four import State as Discs
from envs.games.connect_four import four_in_line
from envs.games.kuhn_poker import State as Hand
from envs.games.nim import State as Heaps

EVERY = pytest.mark.parametrize("rules", GAMES.values(), ids=lambda rules: rules.name)


def played(rules: Rules[Any], *moves: str, start: int = 0) -> Any:
    return functools.reduce(rules.play, moves, rules.starts[start])


def reached(rules: Rules[Any]) -> set[Any]:
    """Every state that can be reached."""
    seen, waiting = set(rules.starts), list(rules.starts)
    while waiting:
        state = waiting.pop()
        after = {rules.play(state, move) for move in rules.legal_moves(state)} - seen
        seen |= after
        waiting += after
    return seen


def games(rules: Rules[Any]) -> Counter[float]:
    """How many games there are, by what seat 0 gets: paths are counted, states visited once."""

    @functools.cache
    def below(state: Any) -> Counter[float]:
        ended = rules.outcome(state)
        if ended is not None:
            return Counter({ended[0]: 1})
        return sum((below(rules.play(state, move)) for move in rules.legal_moves(state)), Counter[float]())

    return sum(map(below, rules.starts), Counter[float]())


@st.composite
def states(draw: st.DrawFn, rules: Rules[Any]) -> Any:
    """A state that random moves lead to."""
    state = draw(st.sampled_from(list(rules.starts)))
    for _ in range(draw(st.integers(0, 42))):
        legal = rules.legal_moves(state)
        if not legal:
            break
        state = rules.play(state, draw(st.sampled_from(legal)))
    return state


# --- all games ------------------------------------------------------------------------------------


@EVERY
@given(data=st.data())
def test_every_state_is_over_or_has_moves_that_are_all_read_and_played(rules: Rules[Any], data: st.DataObject) -> None:
    state = data.draw(states(rules))
    outcome, legal = rules.outcome(state), rules.legal_moves(state)
    assert (outcome is None) == bool(legal)
    assert outcome is None or sum(outcome) == 0
    assert outcome is None or max(outcome) <= rules.stake
    for move in legal:
        for text in (move, f" {move}.\n", f"I thought of this and that, so [{move}]", f"{move}, yes, {move.lower()}!"):
            assert rules.parse(state, text) == move
        after = rules.play(state, move)
        assert after != state
        assert rules.to_move(after) != rules.to_move(state)
        hash(after)


@EVERY
@pytest.mark.parametrize("text", ["", "hm", "[]", "1 or 2, A1 or A2, bet or fold", "٣", "[5] but rather [x]"])
def test_what_names_no_move_is_answered_with_those_there_are(rules: Rules[Any], text: str) -> None:
    state = rules.starts[0]
    with pytest.raises(IllegalMove, match=r"^Say one move. Possible: ") as said:
        rules.parse(state, text)
    assert said.value.args[0].endswith(" ".join(rules.legal_moves(state)))


@EVERY
def test_a_move_that_is_not_legal_is_refused_by_name(rules: Rules[Any]) -> None:
    for move in ("99", "Z9", "raise", ""):
        with pytest.raises(IllegalMove, match=f"^{move} is not possible. Possible: "):
            rules.play(rules.starts[0], move)


def test_a_long_word_does_not_come_back() -> None:
    with pytest.raises(IllegalMove) as said:
        TIC_TAC_TOE.parse(" " * 9, "9" * 5000)
    assert len(str(said.value)) < 100


@EVERY
def test_rules_and_players_pickle(rules: Rules[Any]) -> None:
    assert pickle.loads(pickle.dumps(rules)).name == rules.name
    player = pickle.loads(pickle.dumps(mixed_player(perfect_player(rules), random_player(rules), 0.5)))
    assert set(player(rules.starts[0])) == set(rules.legal_moves(rules.starts[0]))


# --- tic-tac-toe ----------------------------------------------------------------------------------


def test_tic_tac_toe_has_as_many_games_and_positions_as_everyone_counts() -> None:
    assert games(TIC_TAC_TOE) == {1.0: 131_184, -1.0: 77_904, 0.0: 46_080}
    assert games(TIC_TAC_TOE).total() == 255_168
    assert len(reached(TIC_TAC_TOE)) == 5_478


def test_tic_tac_toe_with_random_moves() -> None:
    """X wins with probability 737/1260 and O with 121/420."""

    @functools.cache
    def below(state: str) -> tuple[Fraction, Fraction]:
        ended = TIC_TAC_TOE.outcome(state)
        if ended is not None:
            return Fraction(ended[0] > 0), Fraction(ended[1] > 0)
        after = [below(TIC_TAC_TOE.play(state, move)) for move in TIC_TAC_TOE.legal_moves(state)]
        return sum(x for x, _ in after) / Fraction(len(after)), sum(o for _, o in after) / Fraction(len(after))

    assert below(" " * 9) == (Fraction(737, 1260), Fraction(121, 420))
    random = random_player(TIC_TAC_TOE)
    assert expected(TIC_TAC_TOE, (random, random))[0] == pytest.approx(737 / 1260 - 121 / 420)


def test_what_a_player_of_tic_tac_toe_sees() -> None:
    state = played(TIC_TAC_TOE, "5", "1")
    assert TIC_TAC_TOE.render(state, 0) == TIC_TAC_TOE.render(state, 1) == "O23\n4X6\n789"
    assert TIC_TAC_TOE.to_move(state) == 0
    with pytest.raises(IllegalMove, match=r"5 is not possible. Possible: 2 3 4 6 7 8 9"):
        TIC_TAC_TOE.parse(state, "I take 5")


# --- connect four ---------------------------------------------------------------------------------


def test_connect_four_has_as_many_lines_and_positions_as_everyone_counts() -> None:
    """Sequences of so many moves, none of them after the end (the seven full columns are what 7^7 lacks); positions
    after so many moves are A212693 of the encyclopedia of integer sequences."""
    layer: Counter[Discs] = Counter(CONNECT_FOUR.starts)
    sequences, positions = [], [1]
    for _ in range(7):
        following: Counter[Discs] = Counter()
        sequences.append(sum(paths * len(CONNECT_FOUR.legal_moves(state)) for state, paths in layer.items()))
        if len(sequences) < 7:
            for state, paths in layer.items():
                for move in CONNECT_FOUR.legal_moves(state):
                    following[CONNECT_FOUR.play(state, move)] += paths
            layer = following
            positions.append(len(layer))
    assert sequences == [7, 49, 343, 2_401, 16_807, 117_649, 823_536]
    assert positions == [1, 7, 49, 238, 1_120, 4_263, 16_422]


def lines() -> list[list[tuple[int, int]]]:
    """All four in line of a board of 7 columns and 6 rows."""
    found = []
    for column, row, (right, up) in itertools.product(range(7), range(6), [(1, 0), (0, 1), (1, 1), (1, -1)]):
        cells = [(column + i * right, row + i * up) for i in range(4)]
        if all(0 <= c < 7 and 0 <= r < 6 for c, r in cells):
            found.append(cells)
    return found


LINES = lines()


def bits(cells: Mapping[tuple[int, int], bool]) -> int:
    return sum(1 << (7 * column + row) for (column, row), there in cells.items() if there)


def test_there_are_69_lines_and_each_wins() -> None:
    assert len(LINES) == 69
    for line in LINES:
        assert four_in_line(bits(dict.fromkeys(line, True)))
        for missing in line:
            assert not four_in_line(bits({cell: cell != missing for cell in line}))


def test_four_in_line_is_what_brute_force_says_on_random_boards() -> None:
    rng = np.random.default_rng(0)
    cells = list(itertools.product(range(7), range(6)))
    agreed = Counter[bool]()
    for density in (0.3, 0.4, 0.5):
        for drawn in rng.random((600, 42)) < density:
            board = dict(zip(cells, drawn.tolist(), strict=True))
            brute = any(all(board[cell] for cell in line) for line in LINES)
            assert four_in_line(bits(board)) == brute
            agreed[brute] += 1
    assert min(agreed.values()) > 300, "both answers were seen"


def test_games_of_connect_four_agree_with_a_board_of_lists() -> None:
    rng = np.random.default_rng(1)
    endings = Counter[float]()
    for _ in range(60):
        state, columns, seat = CONNECT_FOUR.starts[0], [[] for _ in range(7)], 0
        while CONNECT_FOUR.outcome(state) is None:
            assert CONNECT_FOUR.legal_moves(state) == tuple(str(c + 1) for c in range(7) if len(columns[c]) < 6)
            move = choose(random_player(CONNECT_FOUR), state, rng)
            columns[int(move) - 1].append(seat)
            state, seat = CONNECT_FOUR.play(state, move), 1 - seat
            shown = CONNECT_FOUR.render(state, seat).splitlines()
            assert shown[-1] == "1234567"
            assert shown[:-1] == [
                "".join("XO"[columns[c][row]] if row < len(columns[c]) else "." for c in range(7))
                for row in reversed(range(6))
            ]
        won = [s for s in (0, 1) if any(_owned(columns, line, s) for line in LINES)]
        outcome = CONNECT_FOUR.outcome(state)
        assert outcome is not None
        assert outcome == ((1.0, -1.0) if won == [0] else (-1.0, 1.0) if won == [1] else (0.0, 0.0))
        endings[outcome[0]] += 1
        with pytest.raises(IllegalMove):
            CONNECT_FOUR.play(state, "1")
    assert {1.0, -1.0} <= set(endings)


def _owned(columns: list[list[int]], line: list[tuple[int, int]], seat: int) -> bool:
    return all(row < len(columns[column]) and columns[column][row] == seat for column, row in line)


def test_a_full_board_of_connect_four_without_four_is_a_draw() -> None:
    order = "121212212121343434434343565656656565777777"
    state = played(CONNECT_FOUR, *order[:-1])
    assert CONNECT_FOUR.outcome(state) is None
    assert CONNECT_FOUR.legal_moves(state) == ("7",)
    assert CONNECT_FOUR.outcome(CONNECT_FOUR.play(state, "7")) == (0.0, 0.0)


def test_the_player_of_connect_four_sees_what_is_near() -> None:
    strong = perfect_player(CONNECT_FOUR)
    assert strong(played(CONNECT_FOUR, *"1212 12".replace(" ", ""))) == {"1": 1.0}, "it wins"
    assert strong(played(CONNECT_FOUR, *"12131")) == {"1": 1.0}, "it does not let the other win"


# --- nim ------------------------------------------------------------------------------------------

SMALL = [heaps for heaps in itertools.product(range(6), repeat=3) if any(heaps)]


def test_nim_is_won_as_the_exclusive_or_says_from_all_small_heaps() -> None:
    value = minimax(NIM)
    for heaps in SMALL:
        for seat in (0, 1):
            assert value(Heaps(heaps, seat), None) == (1.0 if functools.reduce(xor, heaps) else -1.0)


def test_the_player_of_nim_leaves_an_exclusive_or_of_0_whenever_it_can() -> None:
    strong = perfect_player(NIM)
    for heaps in SMALL:
        if functools.reduce(xor, heaps):
            for move in strong(Heaps(heaps)):
                assert functools.reduce(xor, NIM.play(Heaps(heaps), move).heaps) == 0


def test_moves_of_nim() -> None:
    state = NIM.starts[0]
    assert NIM.legal_moves(state) == ("A1", "A2", "A3", "B1", "B2", "B3", "B4", "C1", "C2", "C3", "C4", "C5")
    assert NIM.parse(state, "b 2") == "B2"
    assert NIM.render(NIM.play(state, "B2"), 0) == "A3 B2 C5"
    assert NIM.outcome(played(nim((1,)), "A1")) == (1.0, -1.0)
    for wrong in ((), (0, 0), (-1, 2), (1,) * 27):
        with pytest.raises(ValueError, match="expected 1 to 26 numbers"):
            nim(wrong)
    with pytest.raises(ValueError, match="no heaps"):
        nim()


# --- players that cannot be beaten ----------------------------------------------------------------


@pytest.mark.parametrize(("rules", "seat"), [(TIC_TAC_TOE, 0), (TIC_TAC_TOE, 1), (NIM, 0), (nim((1, 2, 3)), 1)])
def test_a_perfect_player_never_loses_whatever_the_other_does(rules: Rules[Any], seat: int) -> None:
    """Every best move against every legal one."""
    strong, seen, endings = perfect_player(rules), set[Any](), Counter[float]()
    waiting = list(rules.starts)
    while waiting:
        state = waiting.pop()
        ended = rules.outcome(state)
        if ended is not None:
            endings[ended[seat]] += 1
            continue
        moves = strong(state) if rules.to_move(state) == seat else rules.legal_moves(state)
        after = {rules.play(state, move) for move in moves} - seen
        seen |= after
        waiting += after
    assert endings[-1.0] == 0
    assert endings[1.0] > 0
    assert rules is TIC_TAC_TOE or set(endings) == {1.0}


def test_two_perfect_players_of_tic_tac_toe_draw() -> None:
    strong, random = perfect_player(TIC_TAC_TOE), random_player(TIC_TAC_TOE)
    assert expected(TIC_TAC_TOE, (strong, strong)) == (0.0, 0.0)
    assert expected(TIC_TAC_TOE, (strong, random))[0] > 0.9
    assert expected(TIC_TAC_TOE, (random, strong))[1] > 0.7


def test_errors_cost_what_they_should() -> None:
    strong, random = perfect_player(TIC_TAC_TOE), random_player(TIC_TAC_TOE)
    worth = [expected(TIC_TAC_TOE, (mixed_player(strong, random, rate), strong))[0] for rate in (0.0, 0.5, 1.0)]
    assert worth == sorted(worth, reverse=True)
    assert worth[0] == 0.0
    assert worth[-1] == pytest.approx(expected(TIC_TAC_TOE, (random, strong))[0])
    with pytest.raises(ValueError, match=r"error_rate=1.5"):
        mixed_player(strong, random, 1.5)


def test_a_player_that_looks_less_far_plays_worse() -> None:
    random, strong = random_player(TIC_TAC_TOE), perfect_player(TIC_TAC_TOE)
    hasty = perfect_player(TIC_TAC_TOE, lookahead=1)
    assert expected(TIC_TAC_TOE, (random, hasty))[1] < expected(TIC_TAC_TOE, (random, strong))[1] - 0.3
    assert expected(TIC_TAC_TOE, (hasty, strong))[0] < -0.5, "it sees a line of its own, and none of the other"


# --- kuhn poker -----------------------------------------------------------------------------------

INFORMATION = [(), ("check",), ("bet",), ("check", "bet")]


def best_response(seat: int, other: Strategy) -> float:
    """The most that seat can get: over all ways to choose a move for each card and history it may see."""

    def pure(plan: Mapping[Any, int], state: Hand) -> dict[str, float]:
        return {KUHN_POKER.legal_moves(state)[plan[state.history, state.cards[seat]]]: 1.0}

    histories = [h for h in INFORMATION if len(h) % 2 == seat]
    places = list(itertools.product(histories, "JQK"))
    best = -9.0
    for chosen in itertools.product((0, 1), repeat=len(places)):
        plan = dict(zip(places, chosen, strict=True))
        own = functools.partial(pure, plan)
        best = max(best, expected(KUHN_POKER, (own, other) if seat == 0 else (other, own))[seat])
    return best


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.25, 1 / 3])
def test_kuhn_poker_is_worth_an_eighteenth_to_whoever_is_second(alpha: float) -> None:
    equilibrium = functools.partial(kuhn_equilibrium, alpha)
    assert expected(KUHN_POKER, (equilibrium, equilibrium))[0] == pytest.approx(-1 / 18)
    assert best_response(0, equilibrium) == pytest.approx(-1 / 18), "nobody gains by another strategy"
    assert best_response(1, equilibrium) == pytest.approx(1 / 18)


def test_a_player_of_kuhn_poker_who_never_bluffs_can_be_exploited() -> None:
    def honest(state: Hand) -> dict[str, float]:
        bold = state.cards[len(state.history) % 2] == "K"
        return {KUHN_POKER.legal_moves(state)[bold]: 1.0}

    assert best_response(0, honest) > -1 / 18 + 0.01
    with pytest.raises(ValueError, match=r"alpha=0.5: expected a number from 0 to 1/3"):
        kuhn_equilibrium(0.5, Hand(("J", "Q")))


def test_kuhn_poker_has_30_endings_and_shows_a_seat_its_own_card_only() -> None:
    assert sum(games(KUHN_POKER).values()) == 30
    assert sorted(games(KUHN_POKER)) == [-2.0, -1.0, 1.0, 2.0]
    for state in reached(KUHN_POKER):
        for seat in (0, 1):
            others = [Hand(cards, state.history) for cards in itertools.permutations("JQK", 2)]
            alike = [other for other in others if other.cards[seat] == state.cards[seat]]
            assert {KUHN_POKER.render(other, seat) for other in alike} == {KUHN_POKER.render(state, seat)}
            assert not set("JQK") - {state.cards[seat]} & set(KUHN_POKER.render(state, seat))


@pytest.mark.parametrize(
    ("moves", "jack_first"),
    [
        (("check", "check"), -1.0),
        (("check", "bet", "fold"), -1.0),
        (("check", "bet", "call"), -2.0),
        (("bet", "fold"), 1.0),
        (("bet", "call"), -2.0),
    ],
)
def test_what_a_hand_of_kuhn_poker_pays(moves: tuple[str, ...], jack_first: float) -> None:
    low, high = (KUHN_POKER.starts.index(Hand(cards)) for cards in (("J", "K"), ("K", "J")))
    assert KUHN_POKER.outcome(played(KUHN_POKER, *moves, start=low)) == (jack_first, -jack_first)
    kings = jack_first if "fold" in moves else -jack_first
    assert KUHN_POKER.outcome(played(KUHN_POKER, *moves, start=high)) == (kings, -kings)


def test_what_is_hidden_is_not_searched() -> None:
    with pytest.raises(ValueError, match="kuhn_poker has hidden cards; use kuhn_equilibrium"):
        minimax(KUHN_POKER)
    with pytest.raises(ValueError, match="lookahead=2 has no effect in kuhn_poker"):
        perfect_player(KUHN_POKER, lookahead=2)
    with pytest.raises(ValueError, match="lookahead=0"):
        perfect_player(NIM, lookahead=0)
    assert perfect_player(KUHN_POKER)(Hand(("K", "Q"), ("check",))) == {"check": 1.0, "bet": 0.0}
