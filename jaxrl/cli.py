"""The `jaxrl` command: look at runs. Knows argument names and which function serves them, nothing else.

Training is `python -m recipes.<name> key=value ...`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jaxrl.runtime.record import read_records, rollout_file
from jaxrl.runtime.report import write_report
from jaxrl.runtime.run_dir import RunDir
from jaxrl.runtime.view import episode_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status. Errors a user can mend are one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (FileNotFoundError, ValueError) as error:
        print(f"jaxrl {options.command}: {error}", file=sys.stderr)
        return 1


def report(run_dir: Path) -> int:
    """Write report.html and curve.png of a run and say where they are."""
    print(f"{write_report(run_dir)}\n{RunDir(run_dir).curve}")
    return 0


def show(run_dir: Path, *, step: int | None, episodes: int, kind: str) -> int:
    """Print recorded episodes, those of the highest reward first."""
    console = Console(highlight=False, markup=False, emoji=False)
    file = _rollouts(RunDir(run_dir), step, kind)
    ranked = sorted(read_records(file), key=lambda r: -(r["reward"] or 0.0))
    for i, record in enumerate(ranked[:episodes]):
        if i:
            console.rule(style="bright_black")
        console.print(episode_text(record), soft_wrap=not console.is_terminal)
    if len(ranked) > episodes:
        console.print(
            f"\n{len(ranked) - episodes} more episodes in {file} (--episodes N shows more)", style="bright_black"
        )
    return 0


def _rollouts(run: RunDir, step: int | None, kind: str) -> Path:
    """The file of a step, or the latest."""
    files = sorted(run.rollouts.glob(f"{kind}_*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{run.path} has no recorded episodes ({run.rollouts.name}/{kind}_*.jsonl)")
    if step is None:
        return files[-1]
    file = rollout_file(run.rollouts, step, kind=kind)
    if file not in files:
        known = ", ".join(str(int(f.stem.rsplit("_", 1)[1])) for f in files[:12]) + (", ..." if len(files) > 12 else "")
        raise FileNotFoundError(f"{run.path} has no recorded episodes of step {step}; it has: {known}")
    return file


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxrl", description="Look at runs. Training is `python -m recipes.<name> key=value ...`."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("report", help="write report.html and curve.png of a run")
    _add_run_dir(command)
    command.set_defaults(run=lambda o: report(o.run_dir))
    command = commands.add_parser("show", help="print recorded episodes, best first")
    _add_run_dir(command)
    command.add_argument("--step", type=int, help="of this step (default: the latest recorded)")
    command.add_argument("--episodes", type=int, default=2, help="how many (default: 2)")
    command.add_argument("--test", action="store_true", help="of the held-out evaluation")
    command.set_defaults(
        run=lambda o: show(o.run_dir, step=o.step, episodes=o.episodes, kind="test" if o.test else "step")
    )
    return parser


def _add_run_dir(command: argparse.ArgumentParser) -> None:
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the log_path of a run")


if __name__ == "__main__":
    sys.exit(main())
