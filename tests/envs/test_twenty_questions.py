"""Twenty questions: a table that agrees with itself, questions read by simple rules, and who answers them."""

import itertools
import pickle
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from envs.twenty_questions import (
    COST,
    KNOWLEDGE,
    PROPERTIES,
    THINGS,
    Answer,
    ModelAnswerer,
    Player,
    TwentyQuestionsEnv,
    answer_about,
    answered_by,
    demonstrate,
    make_env,
    mixed_player,
    possible,
    property_asked,
    splitting_player,
    tasks,
    thing_guessed,
)
from jaxrl.env import MessageStepResult
from jaxrl.runtime.opponents import Hosted, Scripted
from jaxrl.types import Message, Task

YES, NO, UNKNOWN = Answer.YES, Answer.NO, Answer.UNKNOWN


def task(secret: str = "dog", turns: int = 20) -> Task:
    return Task("20 questions", target=secret, metadata={"turns": turns})


async def play(env: TwentyQuestionsEnv, each: Task, *texts: str) -> list[MessageStepResult]:
    await env.reset(each)
    results = [await env.step(Message("assistant", text)) for text in texts]
    await env.close()
    return results


def said(results: Sequence[MessageStepResult]) -> list[str]:
    return [message.content for result in results for message in result.messages]


# --- the table ------------------------------------------------------------------------------------


def test_the_table_is_large_and_no_two_things_are_alike() -> None:
    assert len(THINGS) >= 60
    assert len(PROPERTIES) >= 25
    assert all(set(known) == set(PROPERTIES) for known in KNOWLEDGE.values())
    rows = [tuple(known.values()) for known in KNOWLEDGE.values()]
    assert len(set(rows)) == len(rows)


def test_every_property_tells_some_things_apart() -> None:
    for name in PROPERTIES:
        answers = [known[name] for known in KNOWLEDGE.values()]
        assert answers.count(YES) >= 3, name
        assert answers.count(NO) >= 3, name


@pytest.mark.parametrize(
    ("implies", "implied"),
    [
        *(("mammal", "animal"), ("bird", "animal"), ("insect", "animal"), ("animal", "alive")),
        *(("fur", "animal"), ("fruit", "food"), ("fruit", "plant"), ("pet", "animal"), ("wheels", "vehicle")),
        *(("vehicle", "made"), ("furniture", "made"), ("clothing", "made"), ("music", "made"), ("electric", "made")),
        *(("tool", "made"),),
    ],
)
def test_what_has_one_property_has_what_it_implies(implies: str, implied: str) -> None:
    wrong = {thing for thing, known in KNOWLEDGE.items() if known[implies] is YES and known[implied] is NO}
    assert wrong <= ({"coat"} if implies == "fur" else set())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *itertools.combinations(("mammal", "bird", "insect", "plant", "made"), 2),
        *itertools.combinations(("vehicle", "furniture", "clothing", "music", "animal", "plant"), 2),
        ("big", "small"),
    ],
)
def test_nothing_has_two_properties_that_exclude_each_other(one: str, other: str) -> None:
    assert [thing for thing, known in KNOWLEDGE.items() if known[one] is known[other] is YES] == []


# --- questions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROPERTIES)
def test_every_phrase_of_a_property_asks_for_it(name: str) -> None:
    for phrase in (name, *PROPERTIES[name]):
        for question in (f"{phrase}?", f"Is it {phrase}?", f"Tell me: would you say {phrase.upper()} fits?"):
            assert property_asked(question) == name, question


@pytest.mark.parametrize(
    "question",
    ["", "?", "Is it nice?", "Is it an animal or a plant?", "Is it not alive?", "Isn't it alive?", "a big animal?"],
)
def test_what_asks_for_nothing_for_two_things_or_in_the_negative_is_not_known(question: str) -> None:
    assert property_asked(question) is None
    assert answer_about("dog", question) is UNKNOWN


@pytest.mark.parametrize(
    "question",
    [
        *("It can't fly, can it?", "It can\u2019t fly?", "It cant fly?", "cannot fly?", "It can fly, can't it?"),
        *("Is it something that doesn't fly?", "Won't it fly?", "Is it unable to fly?", "Neither flies nor swims?"),
        *("Is it a thing other than a bird?", "Anything but a bird?", "Is it unlike a bird?", "Is it a wingless bird?"),
        *("Does it lack legs?", "Is it non living?", "Is it false that it flies?", "Is it different from a bird?"),
    ],
)
def test_a_question_with_a_negation_is_not_answered_as_if_it_had_none(question: str) -> None:
    assert answer_about("eagle", question) is UNKNOWN


@pytest.mark.parametrize(
    ("thing", "question", "answer"),
    [
        ("dog", "Is it alive?", YES),
        ("dog", "Does it fly?", NO),
        ("dog", "Is it dangerous?", UNKNOWN),
        ("penguin", "Can it fly?", NO),
        ("bat", "Can it fly?", YES),
        ("whale", "Does it have legs?", NO),
        ("guitar", "Is it a musical instrument?", YES),
        ("apple", "Can you eat it?", YES),
        ("refrigerator", "Is it bigger than a person?", YES),
        ("coin", "Would it fit in a hand?", YES),
    ],
)
def test_answers(thing: str, question: str, answer: Answer) -> None:
    assert answer_about(thing, question) is answer


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        *(
            ("Guess: dog", "dog"),
            ("guess:Dog.", "dog"),
            ("My guess is a dog!", "dog"),
            ("I guess it is the dog", "dog"),
        ),
        *(("Is it a dog?", "dog"), ("Guess: unicorn", "unicorn"), ("Guess: dog, since it barks", "dog")),
        *(("Is it an animal?", None), ("Is it a unicorn?", None), ("dog", None), ("", None), ("Guess:", None)),
        *(("Guess - dog", "dog"), ("**Guess**: dog", "dog"), ("Guess: - dog", "dog"), ("My guess is: a dog", "dog")),
        *(
            ("I guess it\u2019s a dog", "dog"),
            ("I guess so. Is it a dog?", "dog"),
            ("My guess is that it's a dog", "dog"),
        ),
        *(("I guess I should ask: is it alive?", None), ("My best guess so far: is it an animal?", None)),
        *(("I guess I should ask: is it a dog?", "dog"), ("Guess: -", None), ("Guess: ", None), ("guess-work?", None)),
    ],
)
def test_what_is_read_as_a_guess(text: str, guess: str | None) -> None:
    assert thing_guessed(text) == guess


def test_a_thing_that_is_not_in_the_table_is_named() -> None:
    with pytest.raises(ValueError, match="nothing is known of 'unicorn'"):
        answer_about("unicorn", "alive?")


# --- episodes -------------------------------------------------------------------------------------


async def test_an_episode_that_finds_the_secret() -> None:
    results = await play(make_env(task()), task(), "alive?", "Does it fly?", "Is it nice?", "Guess: cat", "Guess: dog")
    assert said(results) == ["yes", "no", "unknown", "no"]
    assert results[-1] == MessageStepResult(
        terminated=True,
        reward=1.0 - 4 * COST,
        metrics={"success": 1.0, "turns": 5.0, "guesses": 2.0, "unknown_answers": 1.0},
    )
    assert all(result.reward == 0 and not result.terminated for result in results[:-1])


async def test_running_out_of_turns_is_a_loss_by_the_rules_and_the_last_turn_counts() -> None:
    *_, lost = await play(make_env(task(turns=2)), task(turns=2), "alive?", "plant?")
    assert (lost.terminated, lost.truncated, lost.reward, lost.messages) == (True, False, 0.0, ())
    *_, won = await play(make_env(task(turns=2)), task(turns=2), "alive?", "Guess: dog")
    assert won.reward == pytest.approx(1 - COST)


async def test_a_sooner_success_is_worth_more_and_a_late_one_something() -> None:
    rewards = []
    for before in range(20):
        results = await play(make_env(task()), task(), *["alive?"] * before, "Guess: dog")
        rewards.append(results[-1].reward)
    assert rewards == sorted(rewards, reverse=True)
    assert rewards[0] == 1.0
    assert rewards[-1] > 0
    for cost in (-0.1, 0.1):
        with pytest.raises(ValueError, match=r"a late success has to be worth something"):
            await make_env(task(), cost=cost).reset(task())


async def test_an_env_is_one_episode() -> None:
    env = make_env(task())
    with pytest.raises(RuntimeError, match="call reset once"):
        await env.step(Message("assistant", "alive?"))
    await env.reset(task())
    with pytest.raises(RuntimeError, match="make a new one"):
        await env.reset(task())
    await env.step(Message("assistant", "Guess: dog"))
    with pytest.raises(RuntimeError, match="until it ends"):
        await env.step(Message("assistant", "alive?"))


# --- who answers ----------------------------------------------------------------------------------


async def test_a_model_that_answers_cannot_give_the_secret_away() -> None:
    asked: list[Sequence[Message]] = []

    def reply(messages: Sequence[Message]) -> Message:
        asked.append(messages)
        return Message("assistant", ["Yes, it is a unicorn!", "It is a unicorn", "NO.", "unknown"][len(asked) - 1])

    env = make_env(task("unicorn"), answerer=answered_by(partial(Scripted, reply)))
    results = await play(
        env, task("unicorn"), "magic?", "real?", "made of iron?", "pink?", "Is it a dog?", "Is it a unicorn?"
    )
    assert said(results) == ["yes", "unknown", "no", "unknown", "no"]
    assert results[-1].reward > 0.8
    assert len(asked) == 4, "guesses are checked, not asked"
    assert [m.role for m in asked[3]] == ["system", "user"]
    assert "unicorn" in asked[3][0].content
    assert asked[3][1].content == "pink?"


async def test_I9_the_answering_model_is_closed_with_the_env() -> None:
    closed: list[bool] = []

    class Host:
        async def reply(self, messages: Sequence[Message]) -> Message:
            return Message("assistant", "yes")

        async def close(self) -> None:
            closed.append(True)

    await play(make_env(task(), answerer=answered_by(Host)), task(), "alive?")
    assert closed == [True]


def test_factories_pickle() -> None:
    hosted = Hosted("https://api.example.com/v1", "some-model")
    factory = partial(make_env, answerer=answered_by(partial(same, hosted)), cost=0.01)
    assert isinstance(pickle.loads(pickle.dumps(factory))(task()), TwentyQuestionsEnv)
    assert ModelAnswerer(hosted) is not None


def same(model: Hosted) -> Hosted:
    """At module level, so that it can be pickled."""
    return model


# --- tasks ----------------------------------------------------------------------------------------


def test_tasks_are_deterministic_and_balanced_and_keep_the_secret() -> None:
    made = tasks("train", 2 * len(THINGS), seed=3)
    assert made == tasks("train", 2 * len(THINGS), seed=3)
    assert made[:40] == tasks("train", 40, seed=3)
    assert sorted(t.target for t in made[: len(THINGS)]) == sorted(THINGS)
    assert [t.target for t in made] != [t.target for t in tasks("test", len(made), seed=3)]
    assert {t.prompt for t in made} == {"20 questions: ask yes or no, or say Guess: x."}
    (listed,) = tasks("train", 1, things=("dog", "cat"), turns=5, listed=True)
    assert listed.prompt == "5 questions: ask yes or no, or say Guess: x. Things: dog cat."


@pytest.mark.parametrize(
    ("change", "teaches"),
    [({"split": "val"}, "split is 'val'"), ({"things": ()}, "number of things is 0"), ({"turns": 0}, "turns is 0")],
)
def test_wrong_task_arguments_are_refused(change: dict, teaches: str) -> None:
    with pytest.raises(ValueError, match=teaches):
        tasks(**{"split": "train", "count": 1, **change})


# --- players --------------------------------------------------------------------------------------


def turns_taken(player: Player, each: Task, seed: int = 0) -> int | None:
    """How many turns it took; None when it lost."""
    conversation = demonstrate(each, player, np.random.default_rng(seed))
    found = thing_guessed(conversation[-1].content) == each.target
    return sum(m.role == "assistant" for m in conversation) if found else None


def test_the_splitting_player_finds_everything_in_about_as_many_turns_as_there_are_bits() -> None:
    taken = [turns_taken(splitting_player(), each) for each in tasks("test", len(THINGS))]
    assert None not in taken
    assert max(t for t in taken if t) <= 10
    assert np.mean([t for t in taken if t]) < np.log2(len(THINGS)) + 1


def test_the_random_player_finds_what_chance_finds_and_strength_helps() -> None:
    made = tasks("train", 90, things=THINGS[:30])

    def rate(strength: float) -> float:
        player = mixed_player(strength, THINGS[:30])
        return float(np.mean([turns_taken(player, each, seed) is not None for seed, each in enumerate(made)]))

    chance = 1 - (1 - 1 / (len(PROPERTIES) + 30)) ** 20
    assert abs(rate(0.0) - chance) < 4 * (chance * (1 - chance) / len(made)) ** 0.5
    assert rate(0.0) < rate(0.15) < rate(1.0) == 1.0
    with pytest.raises(ValueError, match="strength=2"):
        mixed_player(2.0)


def test_the_secret_is_always_among_what_the_player_thinks_possible() -> None:
    for seed, each in enumerate(tasks("test", 40)):
        conversation = demonstrate(each, mixed_player(0.5), np.random.default_rng(seed))
        for end in range(1, len(conversation), 2):
            assert each.target in possible(conversation[:end])


async def test_a_demonstration_is_what_the_env_would_have_said() -> None:
    for seed, each in enumerate(tasks("train", 10, things=THINGS[:12], turns=8)):
        shown = demonstrate(each, mixed_player(0.5, THINGS[:12]), np.random.default_rng(seed))
        env = make_env(each)
        await env.reset(each)
        ended = [(await env.step(message)).terminated for message in shown if message.role == "assistant"]
        assert ended == [False] * (len(ended) - 1) + [True]
        assert list(env.messages) == shown
