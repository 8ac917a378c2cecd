"""The guessing game: rules, tasks, and players whose success rates are known exactly."""

import functools
import pickle

import numpy as np
import pytest
import trio

from envs.guess_number import (
    Player,
    bisecting_player,
    demonstrate,
    make_env,
    mixed_player,
    random_player,
    read_guess,
    stubborn_player,
    tasks,
)
from jaxrl.env import MessageStepResult
from jaxrl.types import Message, Task

GAMES = [(32, 6), (20, 5), (16, 5), (64, 7), (31, 5), (32, 5), (1, 1), (2, 1), (15, 4)]


def task(secret: int, high: int = 32, turns: int = 6) -> Task:
    return next(each for each in tasks("train", high, high=high, turns=turns) if each.target == secret)


def play(secret: int, *texts: str, high: int = 32, turns: int = 6) -> list[MessageStepResult]:
    async def main() -> list[MessageStepResult]:
        each = task(secret, high, turns)
        env = make_env(each)
        await env.reset(each)
        results = [await env.step(Message("assistant", text)) for text in texts]
        await env.close()
        return results

    return trio.run(main)


def won(conversation: list[Message], secret: int) -> bool:
    return conversation[-1].content == str(secret)


def success_rate(player: Player, high: int, turns: int, episodes: int) -> float:
    rng = np.random.default_rng(0)
    played = tasks("test", episodes, high=high, turns=turns)
    return float(np.mean([won(demonstrate(each, player, rng), each.target) for each in played]))


# --- rules ----------------------------------------------------------------------------------------


def test_an_episode_that_finds_the_secret():
    first, second, last = play(20, "16", "24", "My guess is 20!")
    assert [message.content for message in first.messages] == ["higher"]
    assert [message.content for message in second.messages] == ["lower"]
    assert not first.terminated
    assert first.reward == second.reward == 0.0
    assert last == MessageStepResult(
        terminated=True, reward=1.0, metrics={"success": 1.0, "guesses": 3.0, "valid_guesses": 1.0}
    )


def test_running_out_of_guesses_is_a_loss_by_the_rules():
    *before, last = play(20, "1", "2", "what?", turns=3)
    assert not any(result.terminated or result.truncated for result in before)
    assert (last.terminated, last.truncated, last.reward) == (True, False, 0.0)
    assert last.metrics == {"success": 0.0, "guesses": 3.0, "valid_guesses": 2 / 3}


def test_the_last_guess_counts():
    assert play(20, "1", "20", turns=2)[-1].reward == 1.0


@pytest.mark.parametrize("text", ["", "higher", "7 or 8", "0", "33", "-5", "5.5", "1-32", "9" * 5000, "٧"])
def test_a_message_that_is_no_guess_is_corrected_and_uses_up_a_guess(text: str):
    (result,) = play(20, text)
    assert [message.content for message in result.messages] == ["Say 1-32."]
    assert play(20, text, turns=1)[0].terminated


@pytest.mark.parametrize(("text", "guess"), [("7", 7), (" 7.\n", 7), ("I say 32!", 32), ("007", 7)])
def test_what_is_read_as_a_guess(text: str, guess: int):
    assert read_guess(text, 32) == guess


def test_an_env_is_one_episode():
    async def main() -> None:
        env = make_env(task(1))
        with pytest.raises(RuntimeError, match="call reset once"):
            await env.step(Message("assistant", "1"))
        await env.reset(task(1))
        with pytest.raises(RuntimeError, match="make a new one"):
            await env.reset(task(1))
        await env.step(Message("assistant", "1"))
        with pytest.raises(RuntimeError, match="until it ends"):
            await env.step(Message("assistant", "1"))

    trio.run(main)


# --- tasks ----------------------------------------------------------------------------------------


def test_tasks_are_deterministic_and_balanced():
    played = tasks("train", 70, high=32, turns=6, seed=3)
    assert played == tasks("train", 70, high=32, turns=6, seed=3)
    assert played[:40] == tasks("train", 40, high=32, turns=6, seed=3)
    assert sorted(each.target for each in played[:32]) == list(range(1, 33))
    assert played != tasks("test", 70, high=32, turns=6, seed=3)
    assert played != tasks("train", 70, high=32, turns=6, seed=4)


def test_the_prompt_says_nothing_of_the_secret():
    assert {each.prompt for each in tasks("train", 100, high=32, turns=6)} == {"Guess 1-32. 6 tries."}


@pytest.mark.parametrize(
    ("change", "teaches"),
    [({"split": "val"}, "split is 'val'; expected"), ({"high": 0}, "high is 0"), ({"turns": 0}, "turns is 0")],
)
def test_wrong_task_arguments_are_refused(change: dict, teaches: str):
    with pytest.raises(ValueError, match=teaches):
        tasks(**{"split": "train", "count": 1, "high": 3, "turns": 2, **change})


def test_the_factory_pickles():
    assert pickle.loads(pickle.dumps(make_env)) is make_env


# --- players --------------------------------------------------------------------------------------


def bisecting_rate(high: int, turns: int) -> float:
    return min(high, 2**turns - 1) / high


def random_rate(high: int, turns: int) -> float:
    return 1 - (1 - 1 / high) ** turns


@functools.cache
def mixed_rate(p: float, high: int, possible: int, turns: int) -> float:
    """Bisecting with probability p a turn, else uniform over [1, high], which may say nothing new."""
    if possible == 0 or turns == 0:
        return 0.0

    def after(guess: int) -> float:
        below, above = guess - 1, possible - guess
        wins = 1 + below * mixed_rate(p, high, below, turns - 1) + above * mixed_rate(p, high, above, turns - 1)
        return wins / possible

    wasted = (high - possible) * mixed_rate(p, high, possible, turns - 1)
    uniform = (wasted + sum(after(guess) for guess in range(1, possible + 1))) / high
    return p * after((possible + 1) // 2) + (1 - p) * uniform


def deaf_rate(high: int, turns: int) -> float:
    return mixed_rate(0.0, high, high, turns)


@pytest.mark.parametrize(("high", "turns"), GAMES)
def test_the_bisecting_player_wins_every_secret_exactly_when_it_can(high: int, turns: int):
    rng = np.random.default_rng(0)
    wins = sum(won(demonstrate(each, bisecting_player, rng), each.target) for each in _all_secrets(high, turns))
    assert wins == min(high, 2**turns - 1)
    assert (wins == high) == (2**turns - 1 >= high)


def _all_secrets(high: int, turns: int) -> list[Task]:
    return tasks("test", high, high=high, turns=turns)


@pytest.mark.parametrize(("high", "turns"), [(32, 6), (20, 5), (16, 5), (7, 3)])
@pytest.mark.parametrize("name", ["random", "mixed"])
def test_success_rates_agree_with_the_exact_ones(name: str, high: int, turns: int):
    player, exact = {
        "random": (random_player, random_rate(high, turns)),
        "mixed": (mixed_player(0.5), mixed_rate(0.5, high, high, turns)),
    }[name]
    episodes = 100 * high
    error = (exact * (1 - exact) / episodes) ** 0.5
    assert abs(success_rate(player, high, turns, episodes) - exact) < 4 * error


@pytest.mark.parametrize(("high", "turns"), GAMES)
def test_the_exact_rates_agree_with_each_other(high: int, turns: int):
    assert deaf_rate(high, turns) == pytest.approx(random_rate(high, turns))
    assert mixed_rate(1.0, high, high, turns) == pytest.approx(bisecting_rate(high, turns))


def test_players_read_the_conversation_through_wasted_guesses():
    conversation = [
        Message("system", "Play."),
        *(Message("user", "Guess 1-9. 4 tries."), Message("assistant", "5"), Message("user", "higher")),
        *(Message("assistant", "?"), Message("user", "Say 1-9."), Message("assistant", "8"), Message("user", "lower")),
    ]
    assert bisecting_player(conversation, np.random.default_rng(0)) == 6
    with pytest.raises(ValueError, match="the opening included"):
        bisecting_player(conversation[2:], np.random.default_rng(0))


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_wrong_mixtures_are_refused(p: float):
    with pytest.raises(ValueError, match="expected a probability"):
        mixed_player(p)


@pytest.mark.parametrize(("high", "turns", "p"), [(30, 5, 0.6), (15, 4, 0.55)])
def test_a_stubborn_player_wastes_its_guesses(high: int, turns: int, p: float) -> None:
    """Only bisecting turns narrow anything: k of them find 2^k - 1 of the secrets, k binomial, and the top is luck."""
    player = mixed_player(p, weak=stubborn_player)
    rng = np.random.default_rng(0)
    games = tasks("train", 4000, high=high, turns=turns)
    won = [demonstrate(t, player, rng)[-1].content == str(t.target) for t in games]
    expected = ((1 + p) ** turns - 1) / high
    lucky = 1 / high
    assert expected - 0.03 < np.mean(won) < expected + lucky + 0.03
