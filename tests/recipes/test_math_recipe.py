"""The mathematics recipe: its defaults hold together, its datasets are what they say."""

import json
from pathlib import Path

import numpy as np
import pytest
import trio

from envs.problems import arithmetic, last_boxed
from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.env import GroupDataset, RLDataset
from jaxrl.train import main, parse
from recipes.math_rl import DEFAULTS, Arithmetic, ProblemFiles, SloppyPupil, check_goes_together

RENDERER = renderer_for(byte_tokenizer())


def questions(data: RLDataset | None) -> list[str]:
    assert isinstance(data, GroupDataset)
    return [group.task.prompt for group in data.groups]


def write_rows(path: Path, names: str, answer: str = "#### {}") -> str:
    rows = [{"question": name, "answer": answer.format(i)} for i, name in enumerate(names)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_defaults_hold_together() -> None:
    config = parse([], **DEFAULTS)
    check_goes_together(config)
    assert config.packing is not None
    assert max(config.packing.widths) >= config.engine.context - 1
    assert config.engine.slots >= Arithmetic().group_size * Arithmetic().batch_size
    said = SloppyPupil(right=1.0).play(np.random.default_rng(0)).messages
    assert config.max_tokens >= len(RENDERER.tokenizer.encode(r"\boxed{198}")) + 1
    assert last_boxed(said[-1].content) is not None


def test_I14_held_out_sums_are_the_same_every_time_and_in_no_seed_of_the_training() -> None:
    train, test = trio.run(Arithmetic(batch_size=3, group_size=2, steps=4, test_problems=5), RENDERER)
    assert isinstance(train, GroupDataset)
    assert isinstance(test, GroupDataset)
    assert (len(train), len(train.get_batch(0)), train.groups[0].group_size) == (4, 3, 2)
    assert (len(test), len(test.get_batch(0)), test.groups[0].group_size) == (1, 5, 1)
    assert questions(test) == [problem.question for problem in arithmetic("test", 5, digits=(1,))]
    _, trained = trio.run(Arithmetic(test_on="trained", test_problems=5), RENDERER)
    assert questions(trained) == [problem.question for problem in arithmetic("train", 5, digits=(1,))]
    shown = {SloppyPupil().play(np.random.default_rng(i)).messages[0].content for i in range(300)}
    assert not shown & {problem.question for problem in arithmetic("test", 500, digits=(1,))}


def test_the_sloppy_pupil_knows_the_form_and_is_right_in_its_share() -> None:
    played = [SloppyPupil(right=0.4).play(np.random.default_rng(i)).messages for i in range(200)]
    errors = []
    for question, answer in played:
        left, right = question.content.removesuffix("=?").split("+")
        said = last_boxed(answer.content)
        assert said is not None
        errors.append(int(said) - int(left) - int(right))
    assert set(errors) == {0, -10, -1, 1, 10}
    assert 0.3 < errors.count(0) / len(errors) < 0.5
    with pytest.raises(ValueError, match=r"right=1\.5: expected a share"):
        SloppyPupil(right=1.5)


@pytest.mark.parametrize(
    ("given", "teaches"),
    [
        (
            ["dataset_builder.digits=3"],
            r"dataset_builder\.digits=\(3,\), but warm_start\.demonstrator\.digits=\(1,\)",
        ),
        (
            ["dataset_builder=ProblemFiles", "dataset_builder.train=x"],
            "ProblemFiles, but the warm start shows arithmetic",
        ),
        (["dataset_builder=GymProblems", "dataset_builder.name=chain_sum"], "set warm_start=None"),
    ],
)
def test_I12_a_warm_start_of_other_problems_is_refused(given: list[str], teaches: str) -> None:
    with pytest.raises(ValueError, match=teaches):
        check_goes_together(parse(given, **DEFAULTS))
    if len(given) == 2:
        check_goes_together(parse([*given, "warm_start=None"], **DEFAULTS))


def test_a_file_is_split_without_overlap_and_shuffled_every_epoch(tmp_path: Path) -> None:
    files = ProblemFiles(
        write_rows(tmp_path / "a.jsonl", "abcdefghij"), answer_in="hashes", test_problems=3, epochs=2, batch_size=4
    )
    train, test = trio.run(files, RENDERER)
    assert len(set(questions(test))) == 3
    assert set(questions(train)) == set("abcdefghij") - set(questions(test))
    first, second = questions(train)[:7], questions(train)[7:]
    assert sorted(first) == sorted(second)
    assert first != second
    assert questions(trio.run(files, RENDERER)[0]) == questions(train)
    assert isinstance(train, GroupDataset)
    assert train.groups[0].system == r"Put the final answer in \boxed{}."


def test_two_files_may_not_share_a_question(tmp_path: Path) -> None:
    paths = write_rows(tmp_path / "a.jsonl", "abcd"), write_rows(tmp_path / "b.jsonl", "xaby")
    with pytest.raises(ValueError, match=r"a\.jsonl:1 = .*b\.jsonl:2"):
        trio.run(ProblemFiles(*paths, answer_in="plain", system=""), RENDERER)
    train, test = trio.run(ProblemFiles(*paths, overlap="drop"), RENDERER)
    assert sorted(questions(train)) == ["c", "d"]
    assert questions(test) == list("xaby")


def test_a_file_too_small_to_hold_out_from_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", "ab")
    with pytest.raises(ValueError, match=r"test_problems=128: .*a\.jsonl has 2 problems"):
        trio.run(ProblemFiles(path), RENDERER)


@pytest.mark.slow
def test_a_file_of_ones_own_trains_too(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", "abcdefgh")
    given = ["dataset_builder=ProblemFiles", f"dataset_builder.train={path}", "dataset_builder.answer_in=hashes"]
    given += ["dataset_builder.test_problems=2", "dataset_builder.batch_size=2", "dataset_builder.group_size=2"]
    given += ["warm_start=None", "max_steps=1", "engine.slots=8", "engine.row_buckets=8", "packing.rows=4"]
    given += ["engine.context=129", "engine.position_buckets=129", "engine.extend_lengths=64", "packing.widths=128"]
    run = main(parse([*given, f"log_path={tmp_path / 'run'}"], **DEFAULTS))
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
