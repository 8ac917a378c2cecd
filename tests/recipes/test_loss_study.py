"""The study: which runs it is made of, what it makes of their numbers, and a whole small one from end to end."""

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_run import Late, small, write_model

from jaxrl.algo.tokens import TokenInputs
from jaxrl.runtime.log import read_metrics
from jaxrl.runtime.policy import load_policy, save_policy
from jaxrl.runtime.run_dir import RunDir
from jaxrl.train import Config, describe, main
from recipes.loss_study import replay
from recipes.loss_study.__main__ import parse, run
from recipes.loss_study.figure import smooth, spread, unbroken
from recipes.loss_study.page import outcomes, scale_notes, write_study
from recipes.loss_study.result import (
    COLUMNS,
    GAMES,
    Cell,
    Ended,
    Runs,
    curve,
    difference,
    estimate,
    games_of,
    grid_of,
    points,
    read_runs,
    rows,
)
from recipes.loss_study.study import (
    HELD_OUT,
    Combination,
    Gap,
    combinations,
    is_finished,
    knobs_of,
    model_of,
    parse_name,
    run_config,
    train_one,
)
from recipes.loss_study.table import markdown

# --- which runs ----------------------------------------------------------------------------------


def test_a_study_is_variants_by_gaps_by_seeds_a_seed_at_a_time() -> None:
    study = parse(["variants=grpo,dapo", "seeds=3,4", "staleness=0,2", "noise=0,0.5", "steps=3"])
    runs = combinations(study)
    assert len(runs) == len(set(runs)) == 16
    assert [r.seed for r in runs] == [3] * 8 + [4] * 8
    assert [r.name for r in runs[:4]] == ["grpo-s0-seed3", "dapo-s0-seed3", "grpo-s0-n0.5-seed3", "dapo-s0-n0.5-seed3"]


@pytest.mark.parametrize("gap", [Gap(0), Gap(16), Gap(4, 0.1), Gap(0, 1e-05)], ids=str)
def test_a_directory_s_name_says_which_run_it_is(gap: Gap) -> None:
    combination = Combination("dr_grpo", gap, 12)
    assert parse_name(combination.name) == combination
    assert parse_name("model") is None
    assert parse_name(f"{combination.name}.old") is None


def test_runs_differ_in_variant_seed_and_gap_alone(tmp_path: Path) -> None:
    study = parse(["variants=grpo,dr_grpo", "learning_rates.dr_grpo=0.5", f"log_path={tmp_path}"])
    one = run_config(study, Combination("grpo", Gap(0), 0), Path("m"))
    two = run_config(study, Combination("dr_grpo", Gap(4, 0.1), 1), Path("m"))
    expected = {"loss_fn", "loss_fn_config", "learning_rate", "sampler_gap", "seed", "log_path"}
    assert {name for name in _fields(one) if getattr(one, name) != getattr(two, name)} == expected
    assert one.sampler_gap is None
    assert (two.sampler_gap.steps_behind, two.sampler_gap.noise) == (4, 0.1)  # pyright: ignore
    assert (one.learning_rate, two.learning_rate) == (study.learning_rate, 0.5)
    assert two.engine.slots >= study.batch_size * study.group_size


def _fields(config: Any) -> list[str]:
    return list(config.__chz_fields__)


def test_an_aggregation_that_needs_a_constant_gets_the_budget_of_a_game_unless_one_is_given() -> None:
    study = parse(["variants=grpo,dr_grpo", "turns=4"])
    assert knobs_of(study, "grpo") == {}
    assert knobs_of(study, "dr_grpo") == {"aggregation_constant": 32}
    study = parse(["variants=dr_grpo", "knobs.dr_grpo.aggregation_constant=5"])
    assert knobs_of(study, "dr_grpo") == {"aggregation_constant": 5}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("variants=grpo,gropo", "variant 'gropo' is unknown; expected some of"),
        ("variants=grpo,grpo", "variants=grpo,grpo: expected one or more values, each once"),
        ("seeds=1,1", "seeds=1,1: expected one or more values"),
        ("staleness=0,40 steps=40", "staleness=40 is never reached in steps=40"),
        ("staleness=-1", "expected numbers of 0 or more"),
        ("seeds=-1", "expected numbers of 0 or more"),
        ("eval_every=-1", "eval_every=-1: expected 0 or more"),
        ("variants=grpo,minirl", "variant minirl: .*num_substeps"),
        ("variants=grpo,distillation", "variant distillation: .* learns from a teacher alone"),
        ("variants=grpo knobs.grpo.nope=1", "variant grpo: .*nope does not exist"),
        ("variants=grpo,dapo learning_rates.dapo=-1", "variant dapo: learning_rate=-1"),
        ("variants=grpo group_size=1", "variant grpo: group_size=1: advantage=mean_std compares"),
        ("replay=x variants=grpo knobs.grpo.nope=1", "variant grpo: .*nope does not exist"),
        ("noise=nan", "expected numbers of 0 or more"),
        ("variants=grpo learning_rates.dapo=1", "learning_rates.dapo has no effect: variants=grpo lacks it"),
        ("variants=grpo knobs.dapo.x=1", "knobs.dapo has no effect"),
        ("report=later", "report='later': expected 'after' or 'only'"),
        ("report=only steps=3", "steps has no effect with report=only"),
        ("replay=x seeds=1", "seeds has no effect with replay"),
        ("replay_step=3", "replay_step has no effect without replay"),
        ("replay_checkpoint=3", "replay_checkpoint has no effect without replay"),
        ("seed=1", "Did you mean 'seeds'"),
    ],
)
def test_I12_what_makes_no_study_is_refused(arguments: str, said: str) -> None:
    given = arguments.split()
    if not any(a.startswith("variants=") for a in given):
        given.append("variants=grpo") if "report" not in arguments else None
    with pytest.raises(Exception, match=said):
        parse(given)


# --- what the numbers say ------------------------------------------------------------------------


def test_an_estimate_is_a_t_interval() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.count, found.lowest, found.highest) == (2.0, 3, 1.0, 3.0)
    assert found.half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-5)  # t(0.975, 2), a sample deviation of 1
    single = estimate([0.5, math.nan])
    assert (single.mean, single.count) == (0.5, 1)
    assert math.isnan(single.half)
    assert math.isnan(estimate([]).mean)


def test_the_last_evaluation_comes_after_its_step_and_that_of_an_unfinished_run_before() -> None:
    steps = [{"step": 0, HELD_OUT: 0.1}, {"step": 1}, {"step": 2, HELD_OUT: 0.3, "progress/done_frac": 1.0}]
    assert points(steps, HELD_OUT) == [(0, 0.1), (3, 0.3)]
    assert points(steps[:1], HELD_OUT) == [(0, 0.1)]


def ended(*scores: float, diverged: int | None = None, steps: int = 4) -> Ended:
    """A run of `steps` steps that was evaluated before each of them, and after the last."""
    made = [
        {"step": s, HELD_OUT: score, GAMES: 100.0, "optim/entropy": score, "progress/done_frac": (s + 1) / steps}
        for s, score in enumerate(scores)
    ]
    return Ended(made, diverged)


def test_a_curve_goes_to_the_end_and_a_run_that_diverged_counts_as_0_from_there() -> None:
    whole, lost = ended(0.2, 0.4, 0.6, 0.8), ended(0.2, 0.6, diverged=2)
    runs: Runs = {("grpo", Gap(0)): Cell({0: whole, 1: lost}, 2)}
    grid = grid_of(runs, HELD_OUT)
    assert grid == [0, 1, 2, 4]
    found = curve(runs["grpo", Gap(0)], HELD_OUT, grid)
    assert found.xs == grid
    assert [e.mean for e in found.estimates] == pytest.approx([0.2, 0.5, 0.3, 0.4])
    assert [e.count for e in found.estimates] == [2, 2, 2, 2]
    alone = curve(Cell({1: lost}, 1), HELD_OUT, grid)
    assert [e.mean for e in alone.estimates] == [0.2, 0.6, 0.0, 0.0]
    entropy = curve(runs["grpo", Gap(0)], "optim/entropy", grid_of(runs, "optim/entropy"))
    assert [e.count for e in entropy.estimates] == [2, 2, 1, 1], "what was not measured is not made up"


def test_a_run_that_diverged_leaves_no_policy_and_one_under_way_counts_nowhere(tmp_path: Path) -> None:
    write_run(tmp_path, Combination("grpo", Gap(0), 0), 0.6, 6)
    write_run(tmp_path, Combination("grpo", Gap(0), 1), 0.6, 3)
    (tmp_path / "grpo-s0-seed1" / "diverged.json").write_text("{}")
    write_run(tmp_path, Combination("grpo", Gap(0), 2), 0.6, 5)
    study = parse(["variants=grpo,dapo", "seeds=0,1,2,3", "staleness=0", f"log_path={tmp_path}"])
    (tmp_path / "study.json").write_text(json.dumps(describe(study)))
    first, second = rows(read_runs(tmp_path))
    assert (first.seeds, second.seeds) == ("2 of 4, 1 diverged", "0 of 4")
    assert first.cells[0].mean == pytest.approx((0.6 + 0) / 2)
    assert math.isnan(second.cells[0].mean)
    assert "grpo-s0-seed1: in step 3" in write_study(tmp_path).read_text()


def test_a_difference_is_paired_by_seed_and_more_than_the_games_alone_make() -> None:
    def compared(theirs: list[float], ours: list[float]) -> Runs:
        return {
            (variant, Gap(0)): Cell({seed: ended(0, 0, 0, score) for seed, score in enumerate(scores)}, 3)
            for variant, scores in (("grpo", theirs), ("dapo", ours))
        }

    paired = difference(compared([0.1, 0.5, 0.9], [0.31, 0.7, 1.09]), "dapo", Gap(0))
    assert paired is not None
    assert (paired.over, paired.estimate.count) == ("grpo", 3)
    assert paired.estimate.mean == pytest.approx(0.2)
    assert paired.estimate.half < 0.03, "the spread of the pairs, not of the seeds"
    assert paired.resolved
    alike = difference(compared([0.5, 0.5, 0.5], [0.51, 0.51, 0.51]), "dapo", Gap(0))
    assert alike is not None
    assert alike.estimate.half == pytest.approx(0, abs=1e-12)
    assert alike.chance == pytest.approx(1.96 * math.sqrt(2 * 0.25 / 300), rel=1e-3)
    assert not alike.resolved, "three seeds that differ by one game are no difference"
    single = difference(compared([0.1], [0.9]), "dapo", Gap(0))
    assert single is not None
    assert not single.resolved
    assert difference(compared([0.1], [0.9]), "grpo", Gap(0)) is None

    runs = compared([0.1, 0.5, 0.9], [0.31, 0.7, 1.09])
    assert outcomes(runs, rows(runs)) == [
        "On-policy: grpo ends at a held-out reward of 0.500 ± 0.994; dapo +0.200 ± 0.025 against it."
    ]
    runs = compared([0.5, 0.5, 0.5], [0.51, 0.51, 0.51])
    assert outcomes(runs, rows(runs)) == [
        "On-policy: grpo ends at a held-out reward of 0.500 ± 0.000†; no difference to it is resolved for dapo."
    ]
    text = markdown(rows(runs), "grpo", games_of(runs))
    assert "| 0.510 ± 0.000† | +0.010 ± 0.000† |" in text
    assert "100 games are held out (a standard error of up to 0.050)" in text
    assert "† marks seeds that agree" in text


def test_clipping_by_norm_is_counted_not_assumed() -> None:
    runs: Runs = {("grpo", Gap(0)): Cell({0: Ended([{"step": 0, "optim/grad_norm": n} for n in (1.0, 300.0)])}, 1)}
    assert "which happened in grpo: 1 of 2 updates" in scale_notes(runs, {"max_grad_norm": 100.0})[1]
    assert "which never happened here" in scale_notes(runs, {"max_grad_norm": "inf"})[1]


def test_smoothing_is_over_steps_and_keeps_the_length_and_a_constant() -> None:
    assert smooth([], []) == []
    assert smooth(range(7), [2.0] * 7) == [2.0] * 7
    assert smooth([0, 1, 2], [0.0, 3.0, 0.0], reach=1) == [1.5, 1.0, 1.5]
    assert smooth([0, 9], [0.0, 3.0]) == [0.0, 3.0]


def test_a_line_is_not_drawn_across_steps_without_numbers() -> None:
    xs, ys = unbroken([0, 1, 9, 10], [0.0, 1.0, 2.0, 3.0])
    assert [x for x in xs if not math.isnan(x)] == [0, 1, 9, 10]
    assert math.isnan(xs[2])
    assert math.isnan(ys[2])


@given(st.lists(st.floats(0, 1), max_size=7))
def test_labels_do_not_overlap_and_keep_their_order(ys: list[float]) -> None:
    places = spread(ys, 0.1, (0.0, 1.0))
    assert all(b - a > 0.1 - 1e-9 for a, b in itertools.pairwise(sorted(places)))
    assert all(0.05 - 1e-9 <= place <= 0.95 + 1e-9 for place in places)
    assert all(p <= q for (y, p), (z, q) in itertools.product(zip(ys, places, strict=True), repeat=2) if y < z)
    if all(b - a > 0.1 for a, b in itertools.pairwise([0.0, *sorted(ys), 1.0])):
        assert places == pytest.approx(ys)


@pytest.fixture
def studied(tmp_path: Path) -> Path:
    """A study in files: two variants, two gaps, two seeds, the last run still under way."""
    for v, variant in enumerate(("dapo", "grpo")):
        for staleness in (0, 4):
            for seed in (0, 1):
                last = (v, staleness, seed) == (1, 4, 1)
                write_run(tmp_path, Combination(variant, Gap(staleness), seed), 0.5 + 0.2 * v, 3 if last else 6)
    return tmp_path


def write_run(folder: Path, combination: Combination, success: float, steps: int) -> None:
    lines = []
    for step in range(steps):
        metrics = {
            "step": step,
            "optim/clip_fraction": 0.01 * combination.gap.staleness,
            "optim/entropy": 1.0 - 0.1 * step,
            "optim/kl_sample_train_v1": 0.002,
            "optim/grad_norm": 2.0,
            "optim/lr": 1e-3,
            "async/staleness_max": float(min(step, combination.gap.staleness)),
            "time/rollout": 1.0,
            "time/train": 0.5,
            "time/total": 1.6,
            "progress/done_frac": (step + 1) / 6,
        }
        if step % 2 == 0 or step == 5:
            metrics |= {HELD_OUT: success * (step + 1) / 6 + 0.01 * combination.seed, GAMES: 128.0}
        lines.append(json.dumps(metrics))
    run = folder / combination.name
    run.mkdir()
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_the_table_has_a_row_for_every_variant_and_gap(studied: Path) -> None:
    runs = read_runs(studied)
    table = rows(runs)
    assert [(r.variant, r.gap.staleness, r.seeds) for r in table] == [
        ("grpo", 0, "2 of 2"),
        ("dapo", 0, "2 of 2"),
        ("grpo", 4, "1 of 2"),
        ("dapo", 4, "2 of 2"),
    ]
    by_title = dict(zip((c.title for c in COLUMNS), table[3].cells, strict=True))
    assert by_title["held-out reward"].mean == pytest.approx(0.505)
    assert by_title["clip fraction"].mean == pytest.approx(0.04)
    assert by_title["entropy"].mean == pytest.approx(0.7)
    assert by_title["age of tokens"].mean == 4.0
    assert by_title["seconds a step"].mean == 1.5


def test_the_report_is_made_of_what_is_there_and_needs_nothing_else(studied: Path) -> None:
    page = run(parse(["report=only", f"log_path={studied}"]))
    assert page == studied / "study.html"
    text = page.read_text()
    assert "src='http" not in text
    assert "<script" not in text
    assert "data:image/png;base64," in text
    assert "t-interval" in text
    assert (studied / "study.png").read_bytes().startswith(b"\x89PNG")
    table = json.loads((studied / "table.json").read_text())
    assert [(r["variant"], r["staleness"]) for r in table] == [("grpo", 0), ("dapo", 0), ("grpo", 4), ("dapo", 4)]
    assert table[0]["held-out reward"]["mean"] == pytest.approx(0.705)
    assert "| on-policy | grpo | 0.705 ±" in (studied / "table.md").read_text()


def test_one_seed_has_no_interval_and_a_diverged_run_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, Combination("grpo", Gap(0), 0), 0.6, 4)
    (tmp_path / "grpo-s0-seed0" / "diverged.json").write_text("{}")
    text = write_study(tmp_path).read_text()
    assert "grpo-s0-seed0: in step 4" in text
    assert "| on-policy | grpo | 0.000 | – | 1 of 1, 1 diverged |" in (tmp_path / "table.md").read_text()


def test_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, Combination("grpo", Gap(0), 0), 0.6, 4)  # under way
    with pytest.raises(FileNotFoundError, match="holds no run of a study that came to its end"):
        write_study(tmp_path)


def test_a_run_that_diverges_is_a_result_and_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = parse(["variants=grpo", f"log_path={tmp_path}"])
    combination = Combination("grpo", Gap(4), 0)
    config = run_config(study, combination, Path("m"))

    def diverge(given: Config) -> None:
        write_run(tmp_path, combination, 0.6, 3)
        (Path(given.log_path) / "config.json").write_text(json.dumps(describe(given)))
        raise FloatingPointError("step 3: loss or gradient is not finite; the parameters were left as they were")

    monkeypatch.setattr("recipes.loss_study.study.main", diverge)
    assert not is_finished(study, combination, Path("m"))
    assert str(train_one(config)) == "held-out 0.100 to 0.300, diverged in step 3"
    assert is_finished(study, combination, Path("m"))


def test_a_model_that_was_made_for_another_game_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "warm_start.json").write_text('{"high": 3}')
    with pytest.raises(ValueError, match="was made with"):
        model_of(parse(["variants=grpo", f"log_path={tmp_path}"]))


# --- replay --------------------------------------------------------------------------------------


def test_gradients_are_compared_by_their_angle() -> None:
    a, b = (replay.Gradient(v, {"optim/loss": 1.0}, np.array(d)) for v, d in (("grpo", [3.0, 0]), ("dapo", [0, 2.0])))
    none = replay.Gradient("ppo", {}, np.zeros(2))
    assert a.norm == 3.0
    assert replay.cosine(a.direction, b.direction) == 0.0
    assert replay.cosine(a.direction, 5 * a.direction) == 1.0
    assert math.isnan(replay.cosine(a.direction, none.direction))
    text = replay.markdown([a, b, none], "r", 7, 0, 2)
    assert "Step 7 of r, 2 groups, through every variant at the weights before training." in text
    assert "| grpo | 1.000 | 0.000 | nan |" in text
    assert replay.as_json([a, none], 7, 2)["cosines"] == [["grpo", "ppo", None]]


def test_a_replay_of_what_was_not_recorded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no run directory"):
        run(parse(["variants=grpo", f"replay={tmp_path}"]))
    (tmp_path / "config.json").write_text(json.dumps(describe(small("m", tmp_path, loss_fn="grpo"))))
    with pytest.raises(ValueError, match="has no recorded rollouts"):
        run(parse(["variants=grpo", f"replay={tmp_path}"]))
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000003.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"replay_step=4 was not recorded; .* has 3 to 3"):
        run(parse(["variants=grpo", f"replay={tmp_path}", "replay_step=4"]))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"step 3 of .* was not finished"):
        run(parse(["variants=grpo", f"replay={tmp_path}"]))


# --- from end to end -----------------------------------------------------------------------------

SMALL = """
    variants=grpo,dapo seeds=0 staleness=0,1 steps=2 batch_size=2 group_size=2 test_games=4 warm_start_steps=2
    eval_every=0
"""


@pytest.mark.slow
def test_a_small_study_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SMALL.split(), f"log_path={tmp_path}"]
    assert run(parse(arguments)) == tmp_path / "study.html"
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [
        "[1/4] grpo, on-policy, seed 0",
        "[2/4] dapo, on-policy, seed 0",
        "[3/4] grpo, 1 step behind, seed 0",
        "[4/4] dapo, 1 step behind, seed 0",
    ]
    ages = {
        name: [m.get("async/staleness_max") for m in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("grpo-s0-seed0", "grpo-s1-seed0")
    }
    assert set(ages["grpo-s0-seed0"]) <= {0.0, None}
    assert ages["grpo-s1-seed0"][1] in (1.0, None)
    assert HELD_OUT in read_metrics(tmp_path / "dapo-s1-seed0" / "metrics.jsonl")[1]

    # An interrupted study goes on: what is finished is not made again, what is not is made anew.
    before = (tmp_path / "grpo-s0-seed0" / "metrics.jsonl").stat().st_mtime_ns
    for checkpoint in (tmp_path / "dapo-s1-seed0" / "checkpoints").iterdir():
        checkpoint.rename(tmp_path / "gone")
    run(parse(arguments))
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "3 of 4 runs are finished already"
    assert [line.split(":")[0] for line in said[1:]] == ["[4/4] dapo, 1 step behind, seed 0"]
    assert (tmp_path / "grpo-s0-seed0" / "metrics.jsonl").stat().st_mtime_ns == before

    with pytest.raises(ValueError, match=r"finished, but with learning_rate=0\.002 instead of 0\.5"):
        run(parse([*arguments, "learning_rate=0.5"]))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of another game that kept whole batches."""
    folder = tmp_path_factory.mktemp("recorded")
    model = write_model(folder / "model")
    settings = {"loss_fn": "grpo", "max_steps": 2, "save_every": 1, "num_groups_to_log": 2}
    return main(small(model, folder / "run", data={"val_tasks": ()}, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1])
def test_a_replay_finds_the_gradient_that_the_run_took(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(Late, "__init__", forbidden)
    chosen = [f"replay={recorded}", f"replay_step={step}", f"replay_checkpoint={step}"]
    path = run(parse(["variants=grpo,importance_sampling", *chosen]))
    assert path == recorded / f"replay_step_{step:06d}.md"
    found = json.loads(path.with_suffix(".json").read_text())
    assert set(found["variants"]) == {"grpo", "importance_sampling"}
    measured = read_metrics(recorded / "metrics.jsonl")[step]
    for ours, theirs in (("grad_norm", "optim/grad_norm"), *((m, m) for m in ("optim/loss", "optim/entropy"))):
        assert found["variants"]["grpo"][ours] == pytest.approx(measured[theirs], rel=1e-4, abs=1e-6), ours
    ((_, _, cosine),) = found["cosines"]
    assert 0.1 < cosine < 0.9999, "both follow the same advantages, weighted in different ways"


@pytest.mark.slow
def test_a_replay_takes_the_last_of_both_when_none_is_named(recorded: Path) -> None:
    path = run(parse(["variants=grpo", f"replay={recorded}"]))
    assert "Step 1 of run, 2 groups, through every variant at checkpoint 2." in path.read_text()


def reversed_form(tokens: TokenInputs, *, weight_top: float = 1.0) -> tuple[Any, Any]:
    """A loss of one's own: REINFORCE the wrong way round."""
    return tokens.advantage * tokens.logp_new, tokens.mask & False


def test_a_run_with_a_number_that_json_lacks_or_with_its_own_loss_can_be_replayed() -> None:
    def recorded_as(**settings: Any) -> dict[str, Any]:
        config = json.loads(json.dumps(describe(small("m", Path("r"), **settings))))
        return replay.with_numbers(config)

    infinite = {"loss_fn": "decoupled_ppo", "loss_fn_config": {"weight_max": math.inf}}
    assert recorded_as(**infinite)["loss_fn_config"] == {"weight_max": math.inf}
    assert replay.recorded_algorithm(recorded_as(**infinite)).objective.correct is not None
    own = recorded_as(loss_fn=f"{__name__}:reversed_form")
    assert replay.recorded_algorithm(own).objective.loss.row.form is reversed_form
    with pytest.raises(ValueError, match=r"gone:form.* cannot be imported"):
        replay.recorded_algorithm(recorded_as(loss_fn="gone:form"))


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("turn_ppo", "variant turn_ppo judges turns by a critic"),
        ("distillation", "variant distillation learns from a teacher alone, and this run has none"),
        ("rloo_clip", "variant rloo_clip takes a distance to a reference off the rewards"),
    ],
)
def test_a_variant_that_asks_what_was_not_recorded_is_not_replayed(variant: str, said: str, tmp_path: Path) -> None:
    config = describe(small("m", tmp_path, loss_fn="grpo"))
    own = replay.recorded_algorithm(config)
    with pytest.raises(ValueError, match=said):
        replay.take_gradients(RunDir(tmp_path), config, own, [], parse([f"variants={variant}", "replay=x"]))


@pytest.mark.slow
def test_a_replay_scores_under_the_reference_of_the_run(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    shape, params = load_policy(model, dtype=jnp.float32)
    save_policy(tmp_path / "other", shape, params | {"embed": params["embed"] * 1.5}, "tiny")
    settings = {"loss_fn": "grpo_kl", "loss_fn_config": {"kl_coef": 5.0}, "reference_model": str(tmp_path / "other")}
    run_at = main(small(model, tmp_path / "run", data={"val_tasks": ()}, max_steps=2, num_groups_to_log=2, **settings))
    path = run(
        parse(
            [
                "variants=grpo_kl",
                "knobs.grpo_kl.kl_coef=5.0",
                f"replay={run_at}",
                "replay_step=0",
                "replay_checkpoint=0",
            ]
        )
    )
    found = json.loads(path.with_suffix(".json").read_text())["variants"]["grpo_kl"]
    measured = read_metrics(run_at / "metrics.jsonl")[0]
    assert found["grad_norm"] == pytest.approx(measured["optim/grad_norm"], rel=1e-4)
    assert found["optim/loss"] == pytest.approx(measured["optim/loss"], rel=1e-4)


@pytest.mark.slow
def test_a_batch_that_was_recorded_in_part_is_not_replayed(recorded: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(recorded, cut)
    (cut / "rollouts" / "step_000001.jsonl").write_text("")
    with pytest.raises(
        ValueError, match=r"hold 0 of the 2 groups that it trained on: the run kept num_groups_to_log=2"
    ):
        run(parse(["variants=grpo", f"replay={cut}", "replay_step=1"]))


def forbidden(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("an environment was made")
