"""What is said of a benchmark is what it kept: the tables, and the figures that the README quotes."""

from pathlib import Path

import pytest

from benchmarks import quickstart, recipes, two_steps

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()


@pytest.mark.parametrize("recipe", recipes.MEASURES)
def test_the_table_of_recipes_and_the_readme_say_what_was_measured(recipe: str) -> None:
    assert recipes.row(recipe) in (recipes.OUT / "README.md").read_text().splitlines()
    _, seen = recipes.points(recipes.read(recipe), recipes.MEASURES[recipe])
    assert seen[-1] > seen[0]
    for value in (seen[0], seen[-1]):
        assert f"{value:.3f}" in README


def test_the_readme_says_what_three_seeds_of_the_quickstart_gave() -> None:
    curves = [quickstart.held_out(quickstart.read(path)) for path in sorted(quickstart.OUT.glob("seed_*.jsonl"))]
    for point in (0, -1):
        values = [curve[point][1] for curve in curves]
        for value in (*values, sum(values) / len(values)):
            assert f"{value:.3f}" in README
            assert f"{value:.3f}" in (quickstart.OUT / "README.md").read_text()


def test_the_table_of_two_steps_says_what_was_measured() -> None:
    table = (two_steps.OUT / "README.md").read_text().splitlines()
    kept = two_steps.read()
    assert set(kept) == set(two_steps.RECIPES)
    for recipe, line in kept.items():
        assert two_steps.row(recipe, line) in table


def test_every_folder_of_results_is_in_their_index() -> None:
    for folder in (path.name for path in (ROOT / "benchmarks").iterdir() if path.is_dir() and path.name[0] != "_"):
        assert f"({folder}/" in RESULTS, folder
