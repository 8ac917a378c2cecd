"""Numbers of a run as they happen: metrics.jsonl, further back-ends, and the line on the terminal.

Knows that a step has a number and a flat dict of numbers. It must not know how they were computed, nor hold text
of the model (`record.py` does).
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from jaxrl.runtime.run_dir import write_atomic

Writer = Callable[[int, Mapping[str, float]], None]
"""A further back-end: called with (step, metrics) after the line is on disk. Its errors end the run."""

REWARD = "env/all/reward/total"

_OTHER_COLUMNS = 29  # of a terminal: a short bar, the times, what stands between
_LINES = 20  # that a display without a terminal prints in all ...
_SILENCE = 30.0  # ... but for slow steps: seconds after which the next is printed anyway


class MetricsLog:
    """Owns metrics.jsonl: one valid JSON object a step, flushed as it is written. Use as a context manager.

    Steps only increase. NaN and infinities, which JSON lacks, are written as null and named under "nonfinite".
    Opening with `start=n` drops what an interrupted run wrote for steps n and later, and a torn last line.
    """

    def __init__(self, path: str | Path, *, start: int = 0, writers: Sequence[Writer] = ()) -> None:
        self.path = Path(path)
        self._writers = tuple(writers)
        kept = [m for m in read_metrics(self.path) if m["step"] < start] if self.path.exists() else []
        self._last = int(kept[-1]["step"]) if kept else start - 1
        write_atomic(self.path, "".join(_line(int(m["step"]), _numbers(m)) for m in kept))
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one step. Values are numbers or 0-dimensional arrays.

        Raises ValueError for a step that is not later than the last, TypeError for a value that is no number, and
        whatever the file or a writer raises.
        """
        if step <= self._last:
            raise ValueError(f"metrics of step {step} after those of step {self._last}: one object a step, in order")
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        self._file.write(_line(step, numbers))
        self._file.flush()
        self._last = step
        for writer in self._writers:
            writer(step, numbers)


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """The steps of a metrics.jsonl, "step" included, NaN and infinities restored. A torn last line is left out.

    Raises ValueError, naming the line, when another line is not JSON.
    """
    steps = []
    for record in read_lines(Path(path)):
        record.update({name: float(value) for name, value in record.pop("nonfinite", {}).items()})
        steps.append(record)
    return steps


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file. A last line without its newline was cut by a crash and is left out."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    objects = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is empty or torn
        try:
            objects.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path.name} line {number} is not JSON ({error}); remove that line to go on") from error
    return objects


def held_out(metrics: Mapping[str, float]) -> str | None:
    """The name of the held-out number worth showing: a success rate if there is one, else the reward."""
    names = [name for name in metrics if name.startswith("test/")]
    for ending in ("/success", "/correct", "/reward/total"):
        found = sorted((n for n in names if n.endswith(ending)), key=len)
        if found:
            return found[0]
    return None


def evaluated_at(step: float, metrics: Mapping[str, float]) -> float:
    """Steps trained before the evaluation in the metrics of `step`: it precedes its step, but for the run's last."""
    return step + (metrics.get("progress/done_frac") == 1)


def trained_nothing(metrics: Mapping[str, float]) -> bool:
    """Whether no group of the step had anything to teach."""
    return metrics.get("data/groups_trained") == 0


def points(steps: Sequence[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Where a metric was recorded and finite: steps, or steps trained before an evaluation, and values."""
    place = evaluated_at if name.startswith("test/") else lambda step, _: step
    found = [(place(s["step"], s), s[name]) for s in steps if name in s and math.isfinite(s[name])]
    return [x for x, _ in found], [y for _, y in found]


class Progress:
    """Owns the live display of a run: a bar on a terminal, some lines elsewhere. Use as a context manager."""

    def __init__(self, total: int, *, start: int = 0, label: str = "train", console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._total, self._label = total, label
        self._began = self._printed = time.monotonic()
        self._held_out = ""
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),  # what the others leave over
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left", style="dim"),
            TimeRemainingColumn(elapsed_when_finished=False),
        )
        self._bar = RichProgress(*columns, console=self._console, expand=True) if self._console.is_terminal else None
        self._task = self._bar.add_task(label, total=total, completed=start, numbers="") if self._bar else None

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show step number `step`, counted from 0, as done."""
        name = held_out(metrics)
        if name:
            self._held_out = f"held-out {metrics[name]:.3f} (step {evaluated_at(step, metrics):g})"
        numbers = _numbers_shown(metrics, self._held_out)
        if self._bar is not None and self._task is not None:
            room = self._console.width - _OTHER_COLUMNS - len(f"{self._label}{self._total}{self._total}")
            self._bar.update(self._task, completed=step + 1, numbers=_fitting(numbers, room))
        elif self._is_due(step + 1):
            self._printed = time.monotonic()
            text = f"{self._label} {step + 1}/{self._total}  {'  '.join(numbers)}  {self._printed - self._began:.0f}s"
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _is_due(self, done: int) -> bool:
        every = math.ceil(self._total / _LINES)
        return done % every == 0 or done == self._total or time.monotonic() - self._printed >= _SILENCE


def _numbers_shown(metrics: Mapping[str, float], held_out: str) -> list[str]:
    """What a step's line says, the most important first."""
    shown = []
    if REWARD in metrics:
        shown.append(f"reward {metrics[REWARD]:.3f}")
    if held_out:
        shown.append(held_out)
    if trained_nothing(metrics):
        shown.append("nothing trained")
    if "engine/tokens_per_second" in metrics:
        shown.append(f"{metrics['engine/tokens_per_second']:.0f} tok/s")
    return shown


def _fitting(numbers: Sequence[str], room: int) -> str:
    """As many of them as there is room for: a terminal that lacks it cuts into every column."""
    texts = ("  ".join(numbers[:n]) for n in range(len(numbers), 0, -1))
    return next((text for text in texts if len(text) <= room), "")


def _number(name: str, value: Any) -> int | float:
    """A Python number. Reading a device array waits for it; callers hand over values of a finished step."""
    if name in ("step", "nonfinite"):
        raise ValueError(f"{name!r} is a reserved name of metrics.jsonl")
    if isinstance(value, str | bytes):
        raise TypeError(f"metric {name}={value!r} is text; text belongs into the logs of a transition")
    try:
        return value if isinstance(value, int) and not isinstance(value, bool) else float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"metric {name} is a {type(value).__name__}, not a number: {error}") from error


def _numbers(record: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name != "step"}


def _line(step: int, numbers: Mapping[str, float]) -> str:
    odd = {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}
    record: dict[str, Any] = {"step": step} | {n: None if n in odd else v for n, v in numbers.items()}
    if odd:
        record["nonfinite"] = odd
    return json.dumps(record, allow_nan=False) + "\n"
