"""Every group builder of the tree travels: pickled, it makes the same group in another process."""

import importlib
import pickle
import pkgutil
from collections.abc import Iterator

import pytest

import envs
import jaxrl
import recipes
from envs.games import DuelGroupBuilder, TableGroupBuilder
from envs.preference import PairwisePreferenceGroupBuilder
from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.env import EnvGroupBuilder, RLDatasetBuilder
from jaxrl.runtime.interleave import InterleavedDatasetBuilder, SourceGroupBuilder
from jaxrl.runtime.message_env import MessageEnvGroupBuilder
from jaxrl.runtime.problem import BoxedProblem, ProblemGroupBuilder
from recipes.tictactoe_selfplay import Games

RENDERER = renderer_for(byte_tokenizer())
RECIPES = ["guess_number", "tool_use", "math_rl", "shorter_answers", "twenty_questions"]
PROBLEM = ProblemGroupBuilder(BoxedProblem("1 + 1?", "2"), RENDERER, 3)


OF_WORKERS = {"envs.problems.gym_worker", "envs.problems.sympy_worker"}
"""Run in a process of their own, by path, and import a package of an extra."""


def modules() -> Iterator[str]:
    for package in (jaxrl, envs, recipes):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name not in OF_WORKERS:
                yield found.name


def all_builders() -> set[type]:
    """Every public builder defined in the tree, but for the coupled one: its members begin when others have moved
    (tests/envs/test_games_play.py)."""
    found = set()
    for name in modules():
        for value in vars(importlib.import_module(name)).values():
            if not (isinstance(value, type) and issubclass(value, EnvGroupBuilder)) or value is EnvGroupBuilder:
                continue
            if not value.__name__.startswith("_") and value is not TableGroupBuilder:
                found.add(value)
    return found


async def of_recipe(recipe: str) -> EnvGroupBuilder:
    dataset_builder: RLDatasetBuilder = importlib.import_module(f"recipes.{recipe}").DEFAULTS["dataset_builder"]
    train, _ = await dataset_builder(RENDERER)
    return train.get_batch(0)[0]


async def interleaved() -> EnvGroupBuilder:
    sources = tuple(importlib.import_module(f"recipes.{r}").DEFAULTS["dataset_builder"] for r in RECIPES[:2])
    train, _ = await InterleavedDatasetBuilder(sources, (1.0, 1.0), 4, 2)(RENDERER)
    return train.get_batch(0)[0]


async def examples() -> list[EnvGroupBuilder]:
    duels, _ = await Games(opponent="random")(RENDERER)
    return [PROBLEM, await interleaved(), duels.get_batch(0)[0], *[await of_recipe(r) for r in RECIPES]]


async def openings(builder: EnvGroupBuilder) -> list[tuple[int, ...]]:
    """The first observation of every member."""
    observations = []
    for env in await builder.make_envs():
        observations.append((await env.initial_observation())[0])
        await env.close()
    await builder.cleanup()
    return observations


async def test_no_builder_is_without_an_example() -> None:
    assert (
        all_builders()
        == {type(b) for b in await examples()}
        == {
            DuelGroupBuilder,
            MessageEnvGroupBuilder,
            PairwisePreferenceGroupBuilder,
            ProblemGroupBuilder,
            SourceGroupBuilder,
        }
    )


@pytest.mark.parametrize("which", range(3 + len(RECIPES)))
async def test_I14_a_pickled_builder_makes_the_same_group(which: int) -> None:
    builder = (await examples())[which]
    travelled = pickle.loads(pickle.dumps(builder))
    assert travelled.describe() == builder.describe()
    assert list(travelled.logging_tags()) == list(builder.logging_tags())
    first, *others = await openings(travelled)
    assert first
    assert [first, *others] == await openings(builder)
    assert all(o == first for o in others), "members start from one state"
