"""Every group builder of the tree travels: pickled, it makes the same group in another process."""

import importlib
import pickle
import pkgutil
from collections.abc import Iterator

import pytest

import envs
import jaxrl
import recipes
from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.env import EnvGroupBuilder, RLDatasetBuilder
from jaxrl.runtime.interleave import InterleavedDatasetBuilder, SourceGroupBuilder
from jaxrl.runtime.message_env import MessageEnvGroupBuilder
from jaxrl.runtime.problem import BoxedProblem, ProblemGroupBuilder

RENDERER = renderer_for(byte_tokenizer())
RECIPES = ["guess_number", "tool_use"]
PROBLEM = ProblemGroupBuilder(BoxedProblem("1 + 1?", "2"), RENDERER, 3)


def modules() -> Iterator[str]:
    for package in (jaxrl, envs, recipes):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield found.name


def all_builders() -> set[type]:
    """Every concrete builder defined in the tree."""
    found = set()
    for name in modules():
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, type) and issubclass(value, EnvGroupBuilder) and value is not EnvGroupBuilder:
                found.add(value)
    return found


async def of_recipe(recipe: str) -> EnvGroupBuilder:
    dataset_builder: RLDatasetBuilder = importlib.import_module(f"recipes.{recipe}").DEFAULTS["dataset_builder"]
    train, _ = await dataset_builder(RENDERER)
    return train.get_batch(0)[0]


async def interleaved() -> EnvGroupBuilder:
    sources = tuple(importlib.import_module(f"recipes.{r}").DEFAULTS["dataset_builder"] for r in RECIPES)
    train, _ = await InterleavedDatasetBuilder(sources, (1.0, 1.0), 4, 2)(RENDERER)
    return train.get_batch(0)[0]


async def examples() -> list[EnvGroupBuilder]:
    return [PROBLEM, await interleaved(), *[await of_recipe(r) for r in RECIPES]]


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
            MessageEnvGroupBuilder,
            ProblemGroupBuilder,
            SourceGroupBuilder,
        }
    )


@pytest.mark.parametrize("which", range(2 + len(RECIPES)))
async def test_I14_a_pickled_builder_makes_the_same_group(which: int) -> None:
    builder = (await examples())[which]
    travelled = pickle.loads(pickle.dumps(builder))
    assert travelled.describe() == builder.describe()
    assert list(travelled.logging_tags()) == list(builder.logging_tags())
    first, *others = await openings(travelled)
    assert first
    assert [first, *others] == await openings(builder)
    assert all(o == first for o in others), "members start from one state"
