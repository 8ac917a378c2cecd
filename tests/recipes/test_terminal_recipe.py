"""The terminal recipe: its tasks, who demonstrates them, and what it refuses."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import trio
from sandboxes import missing

from envs.terminal import Bubblewrap, load_task
from envs.terminal.generate import write_tasks
from jaxrl.chat.families import renderer_for
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.chat.transcript import begin
from jaxrl.env import RLDataset
from jaxrl.runtime.message_env import MessageEnvDataset
from jaxrl.train import parse
from recipes.terminal_rl import DEFAULTS, EASIEST, HarborDatasetBuilder, HastyPlayer, check_goes_together, shown_step

RENDERER = renderer_for(byte_tokenizer())


def directories(data: RLDataset | None) -> list[str]:
    assert isinstance(data, MessageEnvDataset)
    return [task.metadata["directory"] for task in data.tasks]


def test_our_own_tasks_are_new_in_every_step_and_held_out_ones_are_never_trained(tmp_path: Path) -> None:
    builder = HarborDatasetBuilder(own_tasks=str(tmp_path), batch_size=3, group_size=2, steps=4, test_tasks=3)
    train, test = trio.run(builder, RENDERER)
    assert (len(train), len(train.get_batch(0))) == (4, 3)
    assert isinstance(test, MessageEnvDataset)
    assert (len(test), len(test.get_batch(0)), test.group_size) == (1, 3, 1)
    assert len({*directories(train), *directories(test)}) == 15
    names = [load_task(Path(each)).name.removeprefix("jaxrl/") for each in directories(train)[:3]]
    assert names == list(EASIEST)
    again, _ = trio.run(builder, RENDERER)
    assert directories(again) == directories(train)


def test_a_directory_of_tasks_is_split_without_overlap_and_shuffled_every_epoch(tmp_path: Path) -> None:
    written = write_tasks(tmp_path, difficulty="easy")
    train, test = trio.run(HarborDatasetBuilder(tasks=str(tmp_path), names=None, test_tasks=2, epochs=2), RENDERER)
    assert len(directories(test)) == 2
    count = len(written) - 2
    first, second = directories(train)[:count], directories(train)[count:]
    assert sorted(first) == sorted(second)
    assert first != second
    assert {*first, *directories(test)} == {str(each) for each in written}
    assert not {*first} & {*directories(test)}


def test_a_task_that_cannot_run_is_named_before_anything_starts(tmp_path: Path) -> None:
    (written,) = write_tasks(tmp_path, names=["write-line"])
    (written / "environment/Dockerfile").write_text("FROM rust:1\n")
    with pytest.raises(ValueError, match=r"no root file system stands for the image 'rust:1'"):
        trio.run(HarborDatasetBuilder(tasks=str(tmp_path)), RENDERER)
    train, _ = trio.run(HarborDatasetBuilder(tasks=str(tmp_path), rootfs=("rust=host",)), RENDERER)
    assert len(train) == 1


def test_without_a_run_the_model_gives_the_renderer(tmp_path: Path) -> None:
    builder = HarborDatasetBuilder(own_tasks=str(tmp_path), model_name="tiny", renderer_name="qwen3", steps=1)
    train, _ = trio.run(builder)
    assert isinstance(train, MessageEnvDataset)
    assert pickle.loads(pickle.dumps(train.env_factory))(train.tasks[0]).tool_specs
    with pytest.raises(ValueError, match="exactly one of them"):
        trio.run(builder, RENDERER)
    with pytest.raises(ValueError, match="exactly one of them"):
        trio.run(HarborDatasetBuilder())


@pytest.mark.parametrize(
    ("arguments", "teaches"),
    [
        (["dataset_builder.names=write-line"], r"dataset_builder\.names=\('write-line',\), but warm_start"),
        (["dataset_builder.output_bytes=9"], r"dataset_builder\.output_bytes=9, but warm_start"),
        (["dataset_builder.tasks=x"], "but the warm start shows our own: set warm_start=None"),
        (["dataset_builder.sandbox=docker"], "set grading=shared"),
        (["dataset_builder.renderer_name=qwen3"], "has no effect without model_name"),
        (["dataset_builder.epochs=2"], "epochs has no effect without tasks"),
        (["dataset_builder.tasks=x", "dataset_builder.names=write-line"], "names has no effect with tasks"),
        (["warm_start.demonstrator.right=2.0"], r"right=2\.0: expected a share"),
    ],
)
def test_I12_what_does_not_go_together_is_refused(arguments: list[str], teaches: str) -> None:
    with pytest.raises(ValueError, match=teaches):
        check_goes_together(parse(arguments, **DEFAULTS))


@pytest.mark.parametrize("name", ["podman", "no_such_module:x", "envs.terminal:Nothing"])
def test_a_sandbox_that_is_none_says_what_there_is(name: str) -> None:
    with pytest.raises(ValueError, match=f"sandbox='{name}'"):
        HarborDatasetBuilder(sandbox=name).options()


def test_a_sandbox_of_ones_own_is_named_by_its_module() -> None:
    options = HarborDatasetBuilder(sandbox="envs.terminal:Bubblewrap").options()
    assert options.sandbox is Bubblewrap
    assert options.images.by_name


def test_who_demonstrates_is_a_player_of_tasks_of_one_step() -> None:
    assert shown_step("write-line").mistakes
    for name in ("none", "release"):
        with pytest.raises(ValueError, match="expected one of our tasks of one step"):
            shown_step(name)


@pytest.mark.slow
def test_the_defaults_hold_together_and_the_hasty_player_knows_the_form(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    config = parse([], **DEFAULTS)
    check_goes_together(config)
    assert config.packing is not None
    player = HastyPlayer(own_tasks=str(tmp_path))
    shown = [player.play(np.random.default_rng(i)) for i in range(60)]
    turns = [RENDERER.turn(message) for each in shown for message in each.messages if message.role == "assistant"]
    assert max(map(len, turns)) <= config.max_tokens
    longest = max(len(begin(RENDERER, each.messages, each.tools).tokens) for each in shown)
    assert longest <= config.engine.context <= max(config.packing.widths)
    right = [
        shown_step(name).solution in (each.messages[1].tool_calls[0].arguments.replace('\\"', '"'))
        for each in shown
        for name in EASIEST
    ]
    assert 0.2 < sum(right) / 60 < 0.6
    assert len({id(each.messages) for each in shown}) <= 12, "each command is run once"
