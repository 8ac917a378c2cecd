"""Checkpoints of a run: a pytree of arrays and a small JSON dict a step, written whole or not at all.

Knows orbax and the folder `checkpoints/`. It must not know what is in the state, nor when to save.

Orbax writes into a temporary folder and renames it, so a crash, a Ctrl-C or a full disk leaves the older
checkpoints as they were and at worst a temporary folder, which is removed here or at the next opening.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message says which one is still good."""


class Checkpointer:
    """Owns a folder of checkpoints, the newest `keep` of which are kept. Use as a context manager.

    Saving is synchronous: when `save` returns the checkpoint is on disk. It blocks; from a trio task call it in
    a thread. With several processes every one makes its own Checkpointer on the same shared folder and calls the
    same methods. read_only: look at the checkpoints of a run that may still be going on; nothing is made or removed.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, read_only: bool = False) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: expected at least 1, or a run could not be resumed")
        self.folder = Path(folder).absolute()
        if jax.process_index() == 0 and not read_only:
            self._discard("*")
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=None if read_only else keep,
                enable_async_checkpointing=False,
                create=not read_only,
            ),
            item_handlers={"state": ocp.StandardCheckpointHandler(), "extra": ocp.JsonCheckpointHandler()},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        """The newest complete checkpoint's step, or None."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, extra: Mapping[str, Any] | None = None) -> None:
        """Write checkpoint `step`: a pytree of arrays and numbers, and JSON-able `extra`. Then drop the oldest.

        Raises ValueError when the step was saved before, CheckpointError when it could not be written (a full
        disk); older checkpoints are then untouched.
        """
        if step in self.steps():
            raise ValueError(f"checkpoint {step} exists already in {self.folder}")
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(dict(extra or {})))
        try:
            self._manager.save(step, args=arguments, force=True)
        except (OSError, ValueError, RuntimeError) as error:
            self._discard(step)
            raise CheckpointError(self._what_is_left(step, error)) from error
        except BaseException:
            self._discard(step)
            raise

    def restore(self, step: int, like: Any) -> tuple[Any, dict[str, Any]]:
        """Read checkpoint `step` into the structure, shapes, dtypes and shardings of `like`.

        `like` holds arrays or `jax.ShapeDtypeStruct`s. Returns (state, extra). Raises CheckpointError when there is
        no such checkpoint or it does not fit.
        """
        self._check_is_there(step)
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        self._check_fits(step, wanted)
        read = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted), extra=ocp.args.JsonRestore())
        )
        return read["state"], read["extra"]

    def read(self, step: int) -> Any:
        """The state of checkpoint `step` on one device, as nested dicts and lists. Errors: CheckpointError."""
        self._check_is_there(step)
        one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), self._saved(step))
        return self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted)))["state"]

    def _saved(self, step: int) -> Any:
        """What checkpoint `step` holds: shapes and dtypes."""
        return self._manager.item_metadata(step)["state"].tree

    def _check_is_there(self, step: int) -> None:
        if step not in self.steps():
            raise CheckpointError(
                f"there is no checkpoint {step} in {self.folder}; there are: {self.steps() or 'none'}"
            )

    def _check_fits(self, step: int, wanted: Any) -> None:
        """Compare names, shapes and dtypes first: orbax would cast a dtype and read a subset of a shape."""
        saved = _leaves(self._saved(step))
        asked = _leaves(wanted)
        wrong = [
            f"  {name}: saved {saved.get(name, 'absent')}, expected {asked.get(name, 'absent')}"
            for name in sorted(saved.keys() | asked.keys())
            if saved.get(name) != asked.get(name)
        ]
        if wrong:
            shown = "\n".join(wrong[:10] + ["  ..."] * (len(wrong) > 10))
            raise CheckpointError(f"checkpoint {step} in {self.folder} does not fit this model or optimizer:\n{shown}")

    def _discard(self, step: int | str) -> None:
        """Free the space of unfinished saves, which a full disk needs most."""
        for folder in self.folder.glob(f"{step}.orbax-checkpoint-tmp*"):
            shutil.rmtree(folder, ignore_errors=True)

    def _what_is_left(self, step: int, error: Exception) -> str:
        steps = self.steps()
        free = shutil.disk_usage(self.folder).free / 1e6
        good = (
            f"Checkpoint {steps[-1]} is complete and can be resumed from" if steps else "There is no earlier checkpoint"
        )
        reason = str(error).strip().splitlines()[-1][-300:] if str(error).strip() else type(error).__name__
        return (
            f"checkpoint {step} could not be written to {self.folder} ({free:.0f} MB free): {reason}\n{good}. Free "
            f"some space (or keep fewer checkpoints), then start again with behavior_if_log_dir_exists=resume"
        )


def _leaves(tree: Any) -> dict[str, str]:
    """Path -> "dtype[shape]" (or the type's name for a Python number)."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_name(path): _describe(leaf) for path, leaf in flat}


def _name(path: tuple[Any, ...]) -> str:
    """One spelling for dict keys, attributes and positions, as orbax stores all of them by name."""
    return "/".join(str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path)


def _describe(leaf: Any) -> str:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    return "number" if shape is None or dtype is None else f"{dtype}{list(shape)}"
