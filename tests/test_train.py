"""A whole run: refused early, exact when resumed, and ended by the error that started it."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chz
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import trio
from small_run import TASKS, WARM, Late, make_late, small, write_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.env import MessageStepResult
from jaxrl.models.lora import LoraConfig
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.runtime.engine import EngineConfig
from jaxrl.runtime.failure import the_one
from jaxrl.runtime.lag import SamplerGap
from jaxrl.runtime.learner import MeshShape, Packing
from jaxrl.runtime.log import read_metrics
from jaxrl.runtime.message_env import MessageEnvDataset, TurnRules
from jaxrl.runtime.run_dir import FREE_KEYS
from jaxrl.runtime.strategy import FailFast
from jaxrl.train import Config, StreamMinibatchConfig, command, describe, main, one_line_errors, parse, train_multi_turn
from jaxrl.types import Message, StopReason, Task

pytestmark = pytest.mark.slow

CLOCKS = ("time/", "engine/tokens_per_second", "engine/compilations")
"""Metrics that are about this machine now."""


NAMES = """
    env/all/reward/total env/all/turns_per_episode env/all/ac_tokens_per_turn env/all/by_group/frac_mixed
    env/all/by_group/frac_all_good env/all/by_group/frac_all_bad rollout/terminated_ratio rollout/truncated_ratio
    rollout/context_overflow_ratio rollout/parse_failure_ratio optim/lr optim/grad_norm optim/entropy
    optim/kl_sample_train_v1 optim/kl_sample_train_v2 optim/clip_fraction data/datums_per_episode
    data/padding_fraction engine/prefill_tokens engine/decode_tokens engine/tokens_per_second engine/row_occupancy
    engine/compilations time/total time/rollout time/train
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("models") / "late")


@pytest.fixture(scope="session")
def finished(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps; beside it lies what it said."""
    folder = tmp_path_factory.mktemp("runs")
    with (folder / "said.txt").open("w") as said, contextlib.redirect_stderr(said):
        return main(small(model, folder / "finished", warm_start=WARM))


def checkpoint(run: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by its path."""
    with Checkpointer(run / "checkpoints") as checkpoints:
        meta = checkpoints._manager.item_metadata(step)["state"].tree
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), meta)
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(like))
        read = checkpoints._manager.restore(step, args=arguments)["state"]
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(read)}


def timeless(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in step.items() if not k.startswith(CLOCKS)} for step in read_metrics(run / "metrics.jsonl")]


# --- what a run leaves ----------------------------------------------------------------------------


def test_metrics_have_the_names_of_the_design(finished: Path) -> None:
    steps = read_metrics(finished / "metrics.jsonl")
    assert [m["step"] for m in steps] == [0, 1, 2, 3]
    for metrics in steps:
        assert set(NAMES.split()) <= set(metrics)
        stops = [v for name, v in metrics.items() if name.startswith("rollout/stop/")]
        assert len(stops) == len(StopReason)
        assert sum(stops) == pytest.approx(1.0)
    assert [("test/env/all/reward/total" in m, "test/env/all/success" in m) for m in steps] == [
        (True, True),
        (False, False),
        (True, True),
        (True, True),
    ]
    assert [m["optim/lr"] for m in steps] == pytest.approx([1e-2, 1e-2, 7.5e-3, 2.5e-3])


def test_I3_at_zero_lag_nothing_is_clipped_and_the_policies_agree(finished: Path) -> None:
    for metrics in read_metrics(finished / "metrics.jsonl"):
        assert metrics["optim/clip_fraction"] == 0.0
        assert abs(metrics["optim/kl_sample_train_v1"]) < 1e-5
        assert metrics["optim/kl_sample_train_v2"] < 1e-8


def test_a_run_directory_holds_what_the_design_lists(finished: Path) -> None:
    files = {p.name for p in finished.iterdir()}
    assert {
        "config.json",
        "versions.json",
        "metrics.jsonl",
        "checkpoints",
        "rollouts",
        "report.html",
        "curve.png",
    } <= files
    rollouts = {p.name for p in (finished / "rollouts").iterdir()}
    assert rollouts == {f"step_{i:06d}.jsonl" for i in range(4)} | {f"test_{i:06d}.jsonl" for i in (0, 2, 4)}
    with Checkpointer(finished / "checkpoints") as checkpoints:
        assert checkpoints.steps() == [2, 4]
    config = json.loads((finished / "config.json").read_text())
    assert config["dataset_builder"]["type"] == "TaskDatasets"
    assert config["engine"]["context"] == 64


def test_progress_and_what_was_learned_are_said(finished: Path) -> None:
    said = (finished.parent / "said.txt").read_text()
    assert "train 4/4" in said
    first, last = (read_metrics(finished / "metrics.jsonl")[i]["test/env/all/success"] for i in (0, -1))
    assert f"held-out env/all/success: {first:.3f} before training, {last:.3f} after 4 steps" in said
    assert str(finished / "report.html") in said


# --- I10 ------------------------------------------------------------------------------------------


def test_I10_killed_and_resumed_is_the_run_that_was_never_killed(
    finished: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "killed"
    here = Path(__file__).parent
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
    child = [sys.executable, str(here / "small_run.py"), model, str(run), "2"]
    killed = subprocess.run(child, cwd=here.parent, env=environment, capture_output=True, text=True, timeout=300)
    assert killed.returncode == 9, killed.stderr
    assert [m["step"] for m in read_metrics(run / "metrics.jsonl")] == [0, 1, 2], "died after a step's metrics"
    with Checkpointer(run / "checkpoints") as checkpoints:
        assert checkpoints.latest() == 2, "and before its checkpoint"

    monkeypatch.setattr("jaxrl.train.run_warm_start", lambda *_, **__: pytest.fail("warm-started again"))
    assert main(small(model, run, warm_start=WARM, behavior_if_log_dir_exists="resume")) == run
    assert timeless(run) == timeless(finished)
    straight, resumed = checkpoint(finished, 4), checkpoint(run, 4)
    assert straight.keys() == resumed.keys()
    assert len(straight) > 10
    for name, array in straight.items():
        assert array.dtype == resumed[name].dtype
        assert array.tobytes() == resumed[name].tobytes(), name
    for file in (finished / "rollouts").iterdir():
        assert file.read_bytes() == (run / "rollouts" / file.name).read_bytes(), "the same tasks, tokens, log-probs"


def test_I10_a_finished_run_that_is_resumed_changes_nothing(finished: Path, model: str) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    main(small(model, finished, warm_start=WARM, behavior_if_log_dir_exists="resume"))
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_I10_another_configuration_is_not_resumed(finished: Path, model: str) -> None:
    changed = small(model, finished, warm_start=WARM, behavior_if_log_dir_exists="resume", learning_rate=0.5)
    with pytest.raises(ValueError, match=r"differs in what changes training\n  learning_rate: was 0.01, now 0.5"):
        main(changed)


def test_the_description_of_a_configuration_is_the_same_in_every_process() -> None:
    def local(task: Task) -> Late:
        return Late()

    text = json.dumps(describe({"factory": local, "object": object(), "when": [float("inf"), None, 3]}))
    assert "0x" not in text
    assert "local" in text


# --- an empty batch -------------------------------------------------------------------------------


def test_a_batch_in_which_all_groups_agree_trains_nothing_and_goes_on(model: str, tmp_path: Path) -> None:
    class Indifferent(Late):
        async def step(self, message: Message) -> MessageStepResult:
            return MessageStepResult(terminated=True, reward=1.0)

    data = {"env_factory": lambda task: Indifferent(), "val_tasks": (), "rules": TurnRules(failed_parse_reward=1.0)}
    run = main(small(model, tmp_path / "run", max_steps=2, max_tokens=30, data=data))
    for metrics in read_metrics(run / "metrics.jsonl"):
        assert metrics["data/groups_trained"] == metrics["data/datums"] == metrics["data/datums_per_episode"] == 0.0
        assert "optim/grad_norm" not in metrics
        assert metrics["env/all/reward/total"] == 1.0
    assert checkpoint(run, 2)["['step']"] == 0, "no update was made"


# --- I9 -------------------------------------------------------------------------------------------


def test_I9_the_error_of_an_env_is_what_main_raises(model: str, tmp_path: Path) -> None:
    made: list[Late] = []
    closed: list[Late] = []

    class Fragile(Late):
        async def step(self, message: Message) -> MessageStepResult:
            if made.index(self) == 4:
                await trio.sleep_forever()
            if made.index(self) == 3 and len(self._messages) == 3:
                raise ConnectionError("the server left") from KeyError("why")
            return await super().step(message)

        async def close(self) -> None:
            closed.append(self)
            await trio.lowlevel.checkpoint()
            if made.index(self) == 4:
                raise OSError("and this one does not close")

    def factory(task: Task) -> Late:
        made.append(Fragile())
        return made[-1]

    # The first three envs are those of the look before training, which are closed too.
    config = small(
        model, tmp_path / "run", data={"env_factory": factory, "val_tasks": (), "batch_size": 1}, max_tokens=30
    )
    with pytest.raises(ConnectionError, match="the server left") as caught:
        main(config)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__context__ is None or not isinstance(caught.value.__context__, BaseExceptionGroup)
    notes = caught.value.__notes__
    assert "in turn 2 of Fragile, member 0" in notes
    assert "in group 0, task 'Say 0.'" in notes
    assert any("and this one does not close" in note for note in notes)
    assert sorted(map(id, closed)) == sorted(map(id, made)), "each was closed once"


def error(kind: type[BaseException], *, cancelled: bool = False) -> BaseException:
    """An error as raised, perhaps by something that was being cancelled."""
    try:
        if not cancelled:
            raise kind
        try:
            raise trio.Cancelled._create(source="explicit")
        finally:
            raise kind
    except BaseException as raised:
        return raised


def test_I9_which_error_isthe_one() -> None:
    first, second = error(ValueError), error(OSError, cancelled=True)
    inner = BaseExceptionGroup("inner", [first])
    inner.add_note("in group 3")
    assert the_one(BaseExceptionGroup("", [inner, second])) is first
    assert first.__notes__ == ["in group 3", "afterwards, while everything was closed: OSError()"]
    interrupt = error(KeyboardInterrupt)
    assert the_one(BaseExceptionGroup("", [error(ValueError), interrupt])) is interrupt
    both = error(ValueError), error(OSError)
    assert the_one(BaseExceptionGroup("", both)) is both[0]
    assert the_one(BaseExceptionGroup("", [second])) is second


# --- warm start -----------------------------------------------------------------------------------


def test_a_warm_start_learns_and_is_kept(finished: Path) -> None:
    losses = [m["optim/loss"] for m in read_metrics(finished / "warm_start" / "metrics.jsonl")]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert sorted(p.name for p in (finished / "warm_start").iterdir()) == ["metrics.jsonl", "model"]
    config = json.loads((finished / "config.json").read_text())
    assert config["warm_start"]["demonstrator"] == {"type": "Alphabet", "first": 110}


# --- I12: refused before a weight is read ---------------------------------------------------------


def damaged(model: str, to: Path, change: Callable[[Path], None]) -> str:
    """A copy of a model with something wrong."""
    to.mkdir()
    for file in Path(model).iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    change(to)
    return str(to)


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def no_template(folder: Path) -> None:
    words = {w: i for i, w in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    (folder / "tokenizer_config.json").unlink()
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab=words, merges=[]))).save_pretrained(folder)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config.json": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "another architecture": (lambda d: edit(d / "config.json", model_type="mamba"), "mamba"),
    "an unknown switch": (lambda d: edit(d / "config.json", hidden_act="swish5"), "swish5"),
    "fewer ids than the tokenizer": (lambda d: edit(d / "config.json", vocab_size=300), "320 ids, its model only 300"),
    "half a weight file": (
        lambda d: os.truncate(d / "model.safetensors", 5000),
        r"model.safetensors \(5000 bytes\) is not a complete safetensors file",
    ),
    "no weight file": (lambda d: (d / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "no tokenizer": (lambda d: (d / "tokenizer_config.json").unlink(), "has no tokenizer"),
    "no chat template": (no_template, "has no chat template"),
}


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a weight fails the test."""
    monkeypatch.setattr("jaxrl.train.load_policy", lambda *_, **__: pytest.fail("a weight was read"))


@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.usefixtures("unread")
def test_I12_a_damaged_model_is_refused_before_a_weight_is_read(what: str, model: str, tmp_path: Path) -> None:
    change, message = DAMAGE[what]
    name = damaged(model, tmp_path / "model", change)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main(small(name, tmp_path / "run"))
    assert not (tmp_path / "run").exists(), "a refused run leaves no directory"


@pytest.mark.usefixtures("unread")
def test_I12_a_truncated_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x03\0\0\0\x05\0\0\0")
    with pytest.raises(ValueError, match=r"m.gguf \(12 bytes\) is truncated or damaged"):
        main(small(str(tmp_path / "m.gguf"), tmp_path / "run"))


def engine(**changes: Any) -> EngineConfig:
    return EngineConfig(**{**vars(small("", Path()).engine), **changes})


LONG = (Task("word " * 30),)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_fn": "pppo"}, "loss_fn='pppo' is unknown; did you mean ppo"),
        ({"loss_fn": "no.such:form"}, "loss_fn='no.such:form' cannot be imported"),
        ({"loss_fn": "jaxrl.types:SCORED"}, "expected a Variant, a LossRow or a function of tokens"),
        (
            {"loss_fn_config": {"clip_low_threshold": 0.8}},
            "clip_low_threshold has no effect: none of advantage 'mean', loss 'importance_sampling' reads it",
        ),
        ({"loss_fn": "minirl"}, "with num_substeps=1 is the policy itself, so nothing is ever clipped"),
        ({"num_substeps": 0}, "num_substeps=0: expected at least 1"),
        ({"reference_model": "tiny"}, "nothing in loss_fn=importance_sampling reads a reference"),
        ({"loss_fn": "distillation"}, "loss_fn=distillation learns from a teacher alone"),
        (
            {"loss_fn": "m2po", "stream_minibatch": StreamMinibatchConfig(1)},
            "part by part, but loss_fn: loss 'm2po' chooses tokens among those of the whole batch",
        ),
        (
            {"loss_fn": "lite_ppo", "stream_minibatch": StreamMinibatchConfig(1)},
            "but advantage: its numbers depend on the other groups",
        ),
        ({"num_substeps": 2, "stream_minibatch": StreamMinibatchConfig(1)}, "but num_substeps: it would change"),
        (
            {"loss_fn_config": {"kl": "advantage_centred"}, "stream_minibatch": StreamMinibatchConfig(1)},
            "but kl: its penalties sum to zero over the batch",
        ),
        ({"loss_fn": "reinforce_pp", "stream_minibatch": StreamMinibatchConfig(1)}, "but kl: its returns are whitened"),
        ({"loss_fn": "reinforce_pp", "max_sampling_attempts": 2}, "with advantage=reward those teach too"),
        ({"num_substeps": 3}, "num_substeps=3 is more than the 2 groups of a batch"),
        ({"loss_fn": "ppo", "loss_fn_config": {"clip_lo": 0.8}}, "nearest names are clip_low_threshold"),
        ({"loss_fn": "ppo", "loss_fn_config": {"aggregation_constant": 9.0}}, "constant=9.0 would have no effect"),
        ({"loss_fn": "dr_grpo"}, "divides by a constant length"),
        ({"temperature": 0.0}, "temperature=0.0: expected a finite number above 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"eval_temperature": -1.0}, "eval_temperature=-1.0: expected a finite number above 0"),
        ({"max_tokens": 0}, "max_tokens=0: expected at least 1"),
        ({"max_turns": 0}, "max_turns=0: expected at least 1"),
        ({"max_sampled_tokens": -1}, "max_sampled_tokens=-1: expected at least 1"),
        ({"max_steps": 0}, "max_steps=0: expected at least 1"),
        ({"max_steps": 11}, "max_steps=11, but the training data has 10 batches"),
        ({"eval_every": -1}, "eval_every=-1: expected at least 0"),
        ({"save_every": -1}, "save_every=-1: expected at least 0"),
        ({"num_groups_to_log": -1}, "num_groups_to_log=-1: expected at least 0"),
        ({"seed": -1}, "seed=-1: expected at least 0"),
        ({"dtype": "float64"}, "dtype='float64': expected one of float32, bfloat16"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"optimizer": OptimizerConfig(learning_rate=0.5)}, "optimizer.learning_rate=0.5 has no effect"),
        ({"optimizer": OptimizerConfig(schedule="linear", warmup_steps=4)}, "must lie after it"),
        ({"renderer_name": "chatlm"}, "unknown renderer 'chatlm'.*Did you mean 'chatml'"),
        ({"renderer_name": "smollm2", "thinking": "strip"}, "thinking='strip' has no effect"),
        ({"thinking": "compact"}, "thinking='compact' with compact_turns=None: give both"),
        ({"compact_turns": 3}, "thinking=None with compact_turns=3: give both"),
        ({"thinking": "compact", "compact_turns": 0}, "compact_turns=0: expected at least 1"),
        ({"renderer_name": "template", "thinking": "keep"}, "have no effect on the renderer 'template'"),
        ({"engine": engine(context=512)}, "engine.context=512 exceeds the 256 positions"),
        ({"packing": Packing((16, 32), 4)}, r"packing.widths=\(16, 32\) has no row for an episode that fills"),
        ({"packing": Packing((64,), 4), "mesh": MeshShape(data=3)}, "packing.rows=4 do not divide among mesh.data=3"),
        ({"packing": Packing((64,), 64), "mesh": MeshShape(data=64)}, "data=64, fsdp=1, tensor=1 needs 64 devices"),
        ({"data": {"tasks": LONG}, "max_steps": 1}, "the prompt of the first task has 15. tokens.*engine.context=64"),
        ({"loss_fn_config": {"loss": "dpo"}}, "group_size=3: the loss compares pairs of episodes; set it to 2"),
        ({"data": {"group_size": 1}}, "group_size=1: an episode is judged against the others"),
        ({"data": {"tasks": ()}}, "tasks is empty"),
        ({"model_name": "./nowhere"}, "nowhere: no such file or directory"),
    ],
)
@pytest.mark.usefixtures("unread")
def test_I12_a_wrong_configuration_is_refused_before_a_weight_is_read(
    changes: dict[str, Any], message: str, model: str, tmp_path: Path
) -> None:
    settings = {"optimizer": OptimizerConfig(), **changes}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main(small(settings.pop("model_name", model), tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()


def test_what_may_differ_between_a_run_and_its_continuation_are_options() -> None:
    assert set(chz.chz_fields(Config)) >= FREE_KEYS


@pytest.mark.usefixtures("unread")
def test_I12_a_frozen_policy_has_the_adapter_that_is_trained(finished: Path, model: str, tmp_path: Path) -> None:
    past = {"frozen_policies": {"past": str(finished)}}
    with pytest.raises(ValueError, match=r"'past' is .*, which trained lora=.*'rank': 2.*, and this run .*'rank': 3"):
        main(small(model, tmp_path / "run", lora=LoraConfig(3, 4.0, ("q_proj", "down_proj")), **past))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("changes", [{"max_turns": 2.5}, {"max_steps": "3"}, {"rollout_strategy": FailFast}], ids=str)
def test_I12_an_option_of_another_type_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(changes))):
        small("tiny", Path("run"), **changes)


@pytest.mark.usefixtures("unread")
def test_a_directory_in_use_is_refused(finished: Path, model: str) -> None:
    for behavior in ("raise", "ask"):  # there is no terminal to ask on
        with pytest.raises(ValueError, match=r"in use.*=resume continues it, =delete starts over"):
            main(small(model, finished, behavior_if_log_dir_exists=behavior))
    assert (finished / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "changes",
    [
        lambda run: {"loss_fn": "nonsense"},
        lambda run: {"mesh": MeshShape(tensor=64)},
        lambda run: {"max_steps": 11},
        lambda run: {"sampler_gap": SamplerGap(9)},
        lambda run: {"model_name": f"{run}/warm_start/model"},
        lambda run: {"reference_model": f"{run}/warm_start/model", "loss_fn_config": {"kl": "k3"}},
        lambda run: {"frozen_policies": {"past": str(run)}},
        lambda run: {"frozen_policies": {"past": f"{run.parent}/nowhere"}},
    ],
)
@pytest.mark.usefixtures("unread")
def test_I12_what_is_wrong_is_found_before_a_directory_is_deleted(
    changes: Callable[[Path], dict[str, Any]], finished: Path, model: str
) -> None:
    before, wrong = sorted(finished.iterdir()), changes(finished)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        main(small(wrong.pop("model_name", model), finished, behavior_if_log_dir_exists="delete", **wrong))
    assert sorted(finished.iterdir()) == before


@pytest.mark.parametrize("place", ["reset", "make", "close"])
@pytest.mark.usefixtures("unread")
def test_I9_an_env_that_cannot_be_started_is_seen_before_training(place: str, model: str, tmp_path: Path) -> None:
    closed: list[int] = []

    class Dead(Late):
        async def reset(self, task: Task) -> Any:
            if place == "reset":
                raise ConnectionError("no server")
            return await super().reset(task)

        async def close(self) -> None:
            closed.append(id(self))
            if place == "close":
                raise ConnectionError("no server")

    def factory(task: Task) -> Late:
        if place == "make":
            raise ConnectionError("no server")
        return Dead()

    with pytest.raises(ConnectionError, match="no server") as caught:
        main(small(model, tmp_path / "run", data={"env_factory": factory}))
    assert caught.value.__notes__ == ["in a first look, before training, at task 'Say 0.'"]
    assert len(closed) == len(set(closed)) == (0 if place == "make" else 3)


# --- the command line -----------------------------------------------------------------------------


def defaults(tmp_path: Path, model: str = "tiny") -> dict[str, Any]:
    config = small(model, tmp_path / "run")
    names = ("dataset_builder", "optimizer", "lora", "engine", "packing", "max_tokens", "learning_rate", "model_name")
    return {name: getattr(config, name) for name in names} | {"log_path": config.log_path}


def test_defaults_are_overridden_whole_or_field_by_field(tmp_path: Path) -> None:
    given = ["lora.rank=7", "optimizer.schedule=linear", "packing=None", "learning_rate=0.5", "max_steps=3"]
    config = parse([*given, "loss_fn=ppo", "loss_fn_config.clip_low_threshold=0.7"], **defaults(tmp_path))
    assert config.lora == LoraConfig(rank=7, alpha=4.0, targets=("q_proj", "down_proj"))
    assert config.optimizer == OptimizerConfig(schedule="linear", warmup_steps=1)
    assert (config.packing, config.learning_rate, config.max_steps) == (None, 0.5, 3)
    assert config.loss_fn_config == {"clip_low_threshold": 0.7}
    assert config.engine == small("", tmp_path).engine
    assert parse(["lora=None"], **defaults(tmp_path)).lora is None
    assert parse([], **defaults(tmp_path)).dataset_builder == small("", tmp_path).dataset_builder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learning_rte=1"], "Did you mean 'learning_rate'"),
        (["optimizer.schedul=cosine"], "Did you mean 'optimizer.schedule'"),
        (["engine.slot=4"], "Did you mean 'engine.slots'"),
        (["max_steps=soon"], "Could not cast 'soon'"),
        (["thinking=loud"], "thinking"),
        (["lora=None", "lora.rank=3"], "lora.rank"),
        (["max_steps"], "key=value"),
        (["engine.slots=0"], "engine.slots=0: expected at least 1"),
        (["optimizer.schedule=cosin"], "expected one of constant, linear, cosine"),
    ],
)
def test_I12_a_wrong_argument_ends_in_a_short_message_and_code_2(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit, one_line_errors():
        parse(arguments, **defaults(tmp_path))
    assert exit.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert "Traceback" not in said


def test_help_is_not_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit, one_line_errors():
        parse(["--help"], **defaults(tmp_path))
    assert exit.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("model_name", "optimizer.schedule", "behavior_if_log_dir_exists"))


def test_an_error_from_inside_an_env_keeps_its_traceback() -> None:
    def fail() -> None:
        error = ValueError("from an env")
        error.add_note("in turn 2 of Late")
        raise error

    with pytest.raises(ValueError, match="from an env"), one_line_errors():
        fail()


def test_a_command_checks_then_runs_then_looks_at_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, Any]] = []

    def trained(config: Config) -> Path:
        told.append(("main", config.max_steps))
        return tmp_path

    monkeypatch.setattr("jaxrl.train.main", trained)
    monkeypatch.setattr("sys.argv", ["recipe", "max_steps=3"])
    command(
        defaults(tmp_path),
        check=lambda config: told.append(("check", config.max_steps)),
        afterwards=lambda config, run: told.append(("afterwards", run)),
    )
    assert told == [("check", 3), ("main", 3), ("afterwards", tmp_path)]


def test_ctrl_c_ends_a_command_in_one_line_and_code_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(config: Config) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxrl.train.main", interrupted)
    monkeypatch.setattr("sys.argv", ["recipe"])
    with pytest.raises(SystemExit) as exit:
        command(defaults(tmp_path))
    assert exit.value.code == 130
    said = capsys.readouterr().err
    assert said == "interrupted before the first checkpoint (save_every=20): a resumed run starts over\n"
    with Checkpointer(tmp_path / "run" / "checkpoints") as checkpoints:
        checkpoints.save(40, {"x": np.zeros(1)})
    with pytest.raises(SystemExit):
        command(defaults(tmp_path))
    assert capsys.readouterr().err == "interrupted; behavior_if_log_dir_exists=resume goes on after step 40\n"


def test_tasks_and_a_factory_are_enough(monkeypatch: pytest.MonkeyPatch, model: str, tmp_path: Path) -> None:
    seen: list[Config] = []
    monkeypatch.setattr("jaxrl.train.main", lambda config, executor, **where: seen.append(config) or tmp_path)
    config = small(model, tmp_path / "run")
    assert train_multi_turn(config, TASKS, make_late, TASKS[:2], batch_size=4, group_size=2) == tmp_path
    train, test = trio.run(seen[0].dataset_builder, None)
    assert isinstance(train, MessageEnvDataset)
    assert isinstance(test, MessageEnvDataset)
    assert (len(train), len(train.get_batch(0)), train.group_size) == (5, 4, 2)
    assert [b.describe() for b in test.get_batch(0)] == [t.prompt for t in TASKS[:2]]
    assert test.group_size == 1
