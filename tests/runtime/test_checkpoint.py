"""Checkpoints come back bit for bit, and whatever interrupts a save leaves the older ones loadable."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.runtime.checkpoint import Checkpointer, CheckpointError


@struct.dataclass
class State:
    params: dict
    optimizer: object
    step: jax.Array


def make_state(scale=1.0, size=1000):
    key = jax.random.key(0)
    params = {
        "wide": scale * jax.random.normal(key, (size, 3)),
        "narrow": jax.random.normal(key, (7,)).astype(jnp.bfloat16),
        "layers": ({"x": jnp.arange(3, dtype=jnp.int8)}, {"x": jnp.array([True, False])}),
        "odd": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-45], jnp.float32),
    }
    optimizer = optax.adamw(1e-3).init({"wide": params["wide"]})
    return State(params, optimizer, jnp.asarray(5, jnp.int32))


def bits(tree):
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def test_I10_a_state_comes_back_bit_for_bit_in_its_own_structure(tmp_path):
    state = make_state()
    extra = {"batch": 3, "best": None, "seen": ["a", 1.5], "nested": {"epoch": 2}}
    with Checkpointer(tmp_path / "c") as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save(3, state, extra)
    with Checkpointer(tmp_path / "c") as checkpoints:
        assert checkpoints.latest() == 3
        for like in (state, abstract(state)):
            restored, found = checkpoints.restore(3, like)
            assert isinstance(restored, State)
            assert jax.tree.structure(restored) == jax.tree.structure(state)
            assert bits(restored) == bits(state)
            assert found == extra


def test_shardings_are_those_asked_for_also_on_another_mesh(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "tensor"))
    rows = NamedSharding(mesh, PartitionSpec("data", "tensor"))
    columns = NamedSharding(mesh, PartitionSpec(None, "data"))
    state = {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), rows)}
    with Checkpointer(tmp_path / "c") as checkpoints:
        checkpoints.save(0, state)
        assert checkpoints.restore(0, abstract(state))[0]["w"].sharding == rows
        moved = checkpoints.restore(0, {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=columns)})[0]["w"]
    assert moved.sharding == columns
    assert (moved == state["w"]).all()


def test_only_the_newest_are_kept(tmp_path):
    with Checkpointer(tmp_path / "c", keep=2) as checkpoints:
        for step in (1, 2, 10):
            checkpoints.save(step, {"x": jnp.full(3, step)})
        assert checkpoints.steps() == [2, 10]
        assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["10", "2"]
        with pytest.raises(CheckpointError, match=r"no checkpoint 1 .*\[2, 10\]"):
            checkpoints.restore(1, {"x": jnp.zeros(3)})
        with pytest.raises(ValueError, match="exists already"):
            checkpoints.save(10, {"x": jnp.zeros(3)})
    with pytest.raises(ValueError, match="keep=0"):
        Checkpointer(tmp_path / "d", keep=0)


@pytest.mark.parametrize(
    ("like", "said"),
    [
        ({"x": jnp.zeros(4)}, r"x: saved float32\[3\], expected float32\[4\]"),
        ({"x": jnp.zeros(3, jnp.bfloat16)}, r"x: saved float32\[3\], expected bfloat16\[3\]"),
        ({"x": jnp.zeros(3), "y": jnp.zeros(1)}, r"y: saved absent, expected float32\[1\]"),
        ({}, r"x: saved float32\[3\], expected absent"),
    ],
)
def test_a_state_of_another_shape_is_refused_by_name(tmp_path, like, said):
    with Checkpointer(tmp_path / "c") as checkpoints:
        checkpoints.save(0, {"x": jnp.ones(3)})
        with pytest.raises(CheckpointError, match=said):
            checkpoints.restore(0, like)


def test_I9_no_thread_is_left(tmp_path):
    before = set(threading.enumerate())
    with Checkpointer(tmp_path / "c") as checkpoints:
        checkpoints.save(0, make_state())
        checkpoints.restore(0, make_state())
    deadline = time.monotonic() + 10  # orbax's asyncio threads end when their event loop is collected
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert set(threading.enumerate()) - before == set()


def test_a_keyboard_interrupt_while_saving_leaves_no_trace(tmp_path, monkeypatch):
    with Checkpointer(tmp_path / "c") as checkpoints:
        checkpoints.save(1, {"x": jnp.ones(3)})
        interrupt_commit(monkeypatch, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, {"x": jnp.zeros(3)})
        assert checkpoints.latest() == 1
        assert [p.name for p in (tmp_path / "c").iterdir()] == ["1"]
        monkeypatch.undo()
        checkpoints.save(2, {"x": jnp.zeros(3)})
        assert checkpoints.latest() == 2


def interrupt_commit(monkeypatch, error):
    """Fail where orbax writes the JSON item, after the arrays."""

    async def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("orbax.checkpoint.JsonCheckpointHandler.async_save", fail)


FILL = """
import sys
import resource
import numpy as np
from jaxrl.runtime.checkpoint import Checkpointer, CheckpointError

folder, limit = sys.argv[1], int(sys.argv[2])
noise = lambda seed: {"x": np.random.default_rng(seed).random(500_000)}
with Checkpointer(folder, keep=1) as checkpoints:
    checkpoints.save(1, noise(1))
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        checkpoints.save(2, noise(2))
    except CheckpointError as error:
        print(error)
    restored, _ = checkpoints.restore(checkpoints.latest(), noise(1))
    assert checkpoints.steps() == [1]
    assert (restored["x"] == noise(1)["x"]).all()
"""


@pytest.fixture(params=["full disk", "file size limit"])
def small_folder(request, tmp_path):
    """A folder where one checkpoint of 4 MB fits and a second does not, and the limit to set on the process."""
    if request.param == "file size limit":
        yield tmp_path, 1_000_000
        return
    mounted = subprocess.run(("mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", tmp_path), capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield tmp_path, 0
    subprocess.run(("umount", "-l", tmp_path), check=True)


@pytest.mark.slow
def test_a_full_disk_leaves_the_previous_checkpoint_and_says_so(small_folder):
    folder, limit = small_folder
    done = subprocess.run((sys.executable, "-c", FILL, folder / "c", str(limit)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "checkpoint 2 could not be written" in done.stdout
    assert "Checkpoint 1 is complete" in done.stdout
    assert "behavior_if_log_dir_exists=resume" in done.stdout
    assert [p.name for p in (folder / "c").iterdir()] == ["1"]


KILLED = """
import sys, time
import numpy as np
import orbax.checkpoint as ocp
from jaxrl.runtime.checkpoint import Checkpointer

async def hang(*args, **kwargs):
    print("saving", flush=True)
    time.sleep(60)

with Checkpointer(sys.argv[1]) as checkpoints:
    checkpoints.save(1, {"x": np.arange(5)})
    ocp.JsonCheckpointHandler.async_save = hang
    checkpoints.save(2, {"x": np.arange(6)})
"""


@pytest.mark.slow
def test_a_kill_while_saving_is_ignored_and_cleaned_up(tmp_path):
    process = subprocess.Popen((sys.executable, "-c", KILLED, tmp_path / "c"), stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saving\n"
        time.sleep(0.2)  # the arrays are on their way to the disk
        os.kill(process.pid, signal.SIGKILL)
    assert len(list((tmp_path / "c").iterdir())) == 2
    with Checkpointer(tmp_path / "c") as checkpoints:
        assert checkpoints.latest() == 1
        assert [p.name for p in (tmp_path / "c").iterdir()] == ["1"]
        assert (checkpoints.restore(1, {"x": np.arange(5)})[0]["x"] == np.arange(5)).all()
        checkpoints.save(2, {"x": np.arange(6)})
