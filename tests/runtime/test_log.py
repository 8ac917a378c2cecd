"""metrics.jsonl is valid JSON whatever happens, and continues where a run was cut."""

import io
import json
import math
import re
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxrl.runtime.log import MetricsLog, Progress, held_out, points, read_metrics


def strict(line):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_one_flushed_object_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(0, {"optim/lr": 1e-3, "engine/prefill_tokens": 7, "x": np.float32(0.5), "y": jnp.asarray(2)})
        assert path.read_text() == '{"step": 0, "optim/lr": 0.001, "engine/prefill_tokens": 7, "x": 0.5, "y": 2.0}\n'
        log.write(5, {})
    assert [m["step"] for m in read_metrics(path)] == [0, 5]


@given(st.dictionaries(st.text(min_size=1).filter(lambda s: s not in ("step", "nonfinite")), st.floats()))
def test_every_float_round_trips_through_valid_json(metrics):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        with MetricsLog(path) as log:
            log.write(0, metrics)
        strict(path.read_text())
        (found,) = read_metrics(path)
    assert found.keys() == metrics.keys() | {"step"}
    for name, value in metrics.items():
        assert found[name] == value or (math.isnan(value) and math.isnan(found[name]))


def test_nan_is_null_and_named(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsLog(path) as log:
        log.write(0, {"a": math.nan, "b": -math.inf, "c": 1.0})
    assert strict(path.read_text()) == {
        "step": 0,
        "a": None,
        "b": None,
        "c": 1.0,
        "nonfinite": {"a": "nan", "b": "-inf"},
    }


def test_resume_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsLog(path) as log:
        for step in range(4):
            log.write(step, {"loss": math.nan if step == 1 else step})
    before = path.read_text().splitlines(keepends=True)
    path.write_text("".join(before) + '{"step": 4, "lo')
    assert len(read_metrics(path)) == 4
    with MetricsLog(path, start=2) as log:
        assert path.read_text() == "".join(before[:2])
        with pytest.raises(ValueError, match="step 1 after"):
            log.write(1, {})
        log.write(2, {"loss": 9})
    assert [m["loss"] for m in read_metrics(path)][-1] == 9


def test_a_resumed_log_equals_a_straight_one(tmp_path):
    with MetricsLog(tmp_path / "straight.jsonl") as log:
        for step in range(6):
            log.write(step, {"a": step / 3})
    with MetricsLog(tmp_path / "cut.jsonl") as log:
        for step in range(5):
            log.write(step, {"a": step / 3})
    with MetricsLog(tmp_path / "cut.jsonl", start=3) as log:
        for step in range(3, 6):
            log.write(step, {"a": step / 3})
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "straight.jsonl").read_bytes()


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_metrics(path)


@pytest.mark.parametrize(
    ("metrics", "error", "said"),
    [
        ({"a": "fast"}, TypeError, "a='fast' is text"),
        ({"a": np.zeros(2)}, TypeError, "a is a ndarray"),
        ({"a": None}, TypeError, "a is a NoneType"),
        ({"step": 1}, ValueError, "reserved"),
    ],
)
def test_what_is_not_a_number_is_refused_by_name(tmp_path, metrics, error, said):
    with MetricsLog(tmp_path / "m.jsonl") as log, pytest.raises(error, match=said):
        log.write(0, metrics)
    assert (tmp_path / "m.jsonl").read_text() == ""


def test_writers_see_what_was_written_in_order(tmp_path):
    seen = []
    with MetricsLog(tmp_path / "m.jsonl", writers=[lambda step, metrics: seen.append((step, dict(metrics)))]) as log:
        log.write(0, {"a": np.float32(1)})
        log.write(3, {"a": 2})
    assert seen == [(0, {"a": 1.0}), (3, {"a": 2})]


def test_the_held_out_number_is_a_success_rate_if_there_is_one():
    assert held_out({"env/all/reward/total": 1.0}) is None
    assert held_out({"test/env/all/reward/total": 1.0, "test/env/all/success": 0.5}) == "test/env/all/success"
    assert held_out({"test/env/all/reward/total": 1.0}) == "test/env/all/reward/total"


def test_an_evaluation_stands_at_the_steps_trained_before_it():
    steps = [{"step": i, "test/a": float(i), "b": float(i), "progress/done_frac": (i + 1) / 4} for i in range(4)]
    assert points(steps, "test/a") == ([0, 1, 2, 4], [0.0, 1.0, 2.0, 3.0])
    assert points(steps[:3], "test/a") == ([0, 1, 2], [0.0, 1.0, 2.0])  # a run that goes on, or was cut
    assert points(steps, "b") == ([0, 1, 2, 3], [0.0, 1.0, 2.0, 3.0])
    assert points([{"step": 0, "b": math.nan}, {"step": 1}, {"step": 2, "b": 1.0}], "b") == ([2], [1.0])


TWO = (
    {"env/all/reward/total": 0.25, "test/env/all/success": 0.5, "engine/tokens_per_second": 1234.5},
    {"env/all/reward/total": 0.75},
)


def show(terminal, steps=TWO, width=100):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width)
    with Progress(len(steps), console=console) as progress:
        for step, metrics in enumerate(steps):
            progress.update(step, metrics)
    return file.getvalue()


def test_without_a_terminal_each_step_is_a_line():
    lines = show(terminal=False).splitlines()
    assert len(lines) == 2
    assert "1/2" in lines[0]
    assert "reward 0.250" in lines[0]
    assert "held-out 0.500 (step 0)" in lines[0]
    assert "1234 tok/s" in lines[0]
    assert "held-out 0.500 (step 0)" in lines[1]  # the last known one


def test_without_a_terminal_many_quick_steps_are_few_lines_and_the_last_is_one():
    lines = show(terminal=False, steps=[{}] * 118).splitlines()
    assert [line.split()[1] for line in lines] == [f"{n}/118" for n in (*range(6, 118, 6), 118)]


def test_without_a_terminal_slow_steps_are_a_line_each(monkeypatch):
    seconds = iter(range(0, 100_000, 40))
    monkeypatch.setattr("jaxrl.runtime.log.time.monotonic", lambda: next(seconds))
    assert len(show(terminal=False, steps=[{}] * 118).splitlines()) == 118


def test_the_display_says_which_step_an_evaluation_belongs_to_and_which_trained_nothing():
    last = {"test/env/all/success": 0.75, "data/groups_trained": 0.0, "progress/done_frac": 1.0}
    assert "held-out 0.750 (step 3)  nothing trained" in show(terminal=False, steps=[{}, {}, last])
    assert "nothing trained" not in show(terminal=False, steps=[{"data/groups_trained": 1.0}])


def test_on_a_terminal_there_is_a_bar():
    text = show(terminal=True)
    assert "2/2" in text
    assert "reward 0.750" in text


def test_a_narrow_terminal_cuts_into_no_number():
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", show(terminal=True, steps=TWO * 75, width=80))
    assert "150/150 reward 0.750  held-out 0.500 (step 148) 0:00:0" in text
    assert "\u2026" not in text
    assert "reward 0.750" in show(terminal=True, width=50)
