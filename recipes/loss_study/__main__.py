"""The study from the command line: train what is missing, then report; or only report; or replay one batch.

    python -m recipes.loss_study variants=grpo,dapo seeds=0,1,2 staleness=0,4,16 log_path=runs/study
    python -m recipes.loss_study report=only log_path=runs/study
    python -m recipes.loss_study replay=runs/study/grpo-s4-seed0 variants=grpo,dapo

The same command again goes on with what is not finished. A replay makes no environment and trains nothing: it takes
the gradient of one recorded batch under every variant and writes how far they agree.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import chz
import jax

from jaxrl.runtime.failure import one_line_errors
from recipes.loss_study.page import write_study
from recipes.loss_study.replay import write_replay
from recipes.loss_study.study import Study, check, train_all

USED_BY = {
    "report=only": ("report", "log_path"),
    "replay=...": ("replay", "replay_step", "replay_checkpoint", "variants", "knobs"),
}
"""Keys that have an effect beside the one that chooses what is done; all but the replay's have one on training."""


def parse(arguments: Sequence[str]) -> Study:
    """The study that key=value arguments ask for. Raises ValueError for keys without effect (I12)."""
    study = chz.Blueprint(Study).make_from_argv(list(arguments))
    given = [argument.split("=", 1)[0].split(".")[0] for argument in arguments if "=" in argument]
    if study.report not in ("after", "only"):
        raise ValueError(f"report={study.report!r}: expected 'after' or 'only'")
    mode = "replay=..." if study.replay is not None else "report=only" if study.report == "only" else None
    if mode is not None:
        unused = [key for key in given if key not in USED_BY[mode]]
        known = ", ".join(USED_BY[mode])
        if unused:
            raise ValueError(f"{unused[0]} has no effect with {mode}, which reads {known}")
    else:
        unused = [key for key in given if key in ("replay_step", "replay_checkpoint")]
        if unused:
            raise ValueError(f"{unused[0]} has no effect without replay=<run directory>")
    check(study)
    return study


def run(study: Study) -> Path:
    """Do what the study asks for; return the file to look at."""
    if study.replay is not None:
        return write_replay(study)
    folder = Path(study.log_path).expanduser()
    if study.report != "only":
        train_all(study, say)
    return write_study(folder)


def say(line: str) -> None:
    """A line for whoever waits."""
    print(line, flush=True)


def keep_compiled(folder: Path) -> None:
    """Let the runs of a study share what XLA compiled: they have the same shapes."""
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(folder.resolve()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def command(arguments: Sequence[str]) -> None:
    """Run, and say where the result lies."""
    with one_line_errors(interrupted=lambda: "interrupted; the same command goes on with what is not finished"):
        study = parse(arguments)
        keep_compiled(Path(study.log_path).expanduser() / "compiled")
        print(run(study))


if __name__ == "__main__":
    command(sys.argv[1:])
