"""The report is one self-contained page in which a model's text stays text."""

import re
from html.parser import HTMLParser

import pytest
from fabricate import HOSTILE, fabricate

from jaxrl.runtime.chart import Series, area_chart, line_chart, share_bar
from jaxrl.runtime.log import MetricsLog
from jaxrl.runtime.record import read_records
from jaxrl.runtime.report import outcome, write_report
from jaxrl.runtime.run_dir import open_run_dir
from jaxrl.runtime.view import SHADES, choose, episode_html, episode_text, pieces, visible

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags nest; keeps tags, attributes and text."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.text = [], set(), [], ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fabricate(tmp_path_factory.mktemp("runs") / "demo", steps=41)


@pytest.fixture(scope="module")
def html(run):
    assert write_report(run.path) == run.report
    return run.report.read_text()


def test_X11_text_of_the_model_is_never_markup(html):
    page = Page(html)
    assert "script" not in page.tags
    assert (
        "<script>alert(1)</script> [/bold] [red]x[/red] \u27e81B\u27e9[31m\u27e8202E\u27e9 &amp; \u27e800\u27e9</pre>"
        in page.text
    )
    assert "ConnectionError: game <b>server</b> went away" not in html
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", html)


def test_the_page_needs_nothing_else_and_runs_nothing(html):
    page = Page(html)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "base", "form"}
    names = {name for name, _ in page.attributes}
    assert not {n for n in names if n.startswith("on") or n in ("href", "src", "xlink:href", "srcset", "style")}
    assert "default-src 'none'" in html
    assert "url(" not in html
    assert "@import" not in html


def test_the_page_says_what_was_run_and_learned(html):
    text = Page(html).text
    assert "Held-out success rose from 11.5% at step 0 to 94.7% at step 41." in text
    for said in (
        "41",
        "jax 0.",
        "Python 3.",
        "Training reward",
        "How episodes ended",
        "Entropy",
        "max turns",
        "rollout 55%",
    ):
        assert said in text
    assert "optim/grad_norm" in text
    assert "1 not finite" in text
    assert "guess_number" in text
    assert "held-out, best" in text


def test_the_curve_is_a_picture(run, html):
    assert run.curve.read_bytes().startswith(b"\x89PNG")
    assert run.curve.stat().st_size > 10_000


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_has_hardly_begun_has_a_report(tmp_path, steps):
    run = open_run_dir(tmp_path, config={})
    with MetricsLog(run.metrics) as log:
        for step in range(steps):
            log.write(step, {"env/all/reward/total": 0.5, "rollout/stop/terminated": 1.0, "time/total": 1.0})
    Page(write_report(tmp_path).read_text())


def test_a_directory_without_metrics_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="log_path"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "No step was recorded yet: there is nothing to show."),
        ([{}], "1 steps; no reward was recorded."),
        ([{"env/all/reward/total": 0.5}], "Training reward at step 0: 0.5."),
        ([{"test/env/all/success": 0.5}] * 2, "Held-out success stayed at 50.0% from step 0 to step 1."),
        (
            [{"test/env/all/success": x} for x in (0.5, 0.9, 0.2)],
            "fell from 50.0% at step 0 to 20.0% at step 2 (best 90.0% at step 1).",
        ),
        (
            [{"test/env/all/reward/total": x} for x in (-1.0, float("nan"), 2.0)],
            "Held-out reward rose from -1 at step 0 to 2 at step 2.",
        ),
        (
            [{"env/all/reward/total": 0.0, "data/groups_trained": n} for n in (0.0, 2.0, 0.0)],
            "stayed at 0 from step 0 to step 2. 2 of 3 steps trained nothing: no group had anything to teach.",
        ),
    ],
)
def test_the_outcome_is_a_sentence(values, said):
    assert outcome([{"step": i} | v for i, v in enumerate(values)]).endswith(said)


def records(run):
    return read_records(run.rollouts / "step_000000.jsonl")


def test_tokens_tell_their_id_log_prob_and_version(run):
    record = records(run)[0]
    turn = record["turns"][1]
    shown = list(pieces(turn))
    assert "".join(p.text for p in shown) == "So it is 12 \u2014 na\u00efve bisection"
    assert [p.text for p in shown].count("\u2014") == 1
    dash = next(p for p in shown if p.text == "\u2014")
    assert dash.about.count("token") == 3  # three bytes spell it
    assert f"token {turn['action'][0]}, log-prob {turn['logprobs'][0]:.3f}" in episode_html(record, label="x")


def test_shades_go_from_certain_to_surprising():
    def shade(logprob):
        turn = {"action": [1], "logprobs": [logprob], "versions": [0], "action_text": ["a"]}
        return next(pieces(turn)).shade

    assert [shade(x) for x in (0.0, -0.5, -1.0, -100.0, None, 1e-7)] == [0, 0, 1, SHADES - 1, SHADES - 1, 0]


def test_X11_a_terminal_gets_no_control_codes_and_no_markup(run):
    text = episode_text(records(run)[1])
    assert visible(HOSTILE) in text.plain
    assert "\x1b" not in text.plain
    assert "[red]x[/red]" in text.plain


def test_an_endless_episode_is_cut_for_display(run):
    record = records(run)[0]
    turn = record["turns"][0]
    n = 10_000
    turn |= {"action": [1] * n, "logprobs": [0.0] * n, "versions": [0] * n, "action_text": ["a"] * n}
    turn["observation_text"] = "x" * n
    html = episode_html(record, label="long")
    assert "7000 more tokens" in html
    assert "7000 characters" in html


def test_the_best_and_the_worst_are_chosen():
    made = [{"reward": r} for r in (0.5, None, 1.0, -2.0)]
    assert choose(made) == [("best", made[2]), ("worst", made[1])]
    assert choose(made[:1]) == [("only episode", made[0])]
    assert choose([]) == []


def ticks(chart):
    return re.findall(r'text-anchor="(end|middle)">([^<]*)</text>', chart)


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-1.5e-7, 4e-8, ["-1.5e-7", "-1e-7", "-5e-8", "0", "5e-8"]),
        (0.0, 0.001, ["0", "0.00025", "0.0005", "0.00075", "0.001"]),
        (12_340.0, 12_341.0, ["12.34k", "12.34025k", "12.3405k", "12.34075k", "12.341k"]),
        (0.0, 0.0, ["0", "0.25", "0.5", "0.75", "1"]),
    ],
)
def test_no_two_ticks_read_alike(low, high, said):
    chart = line_chart([Series("a", [0, 1], [low, high])])
    assert [text for side, text in ticks(chart) if side == "end" and text != "step"] == said


def test_all_charts_of_a_run_have_the_same_steps(tmp_path):
    """Also of a metric that nothing was recorded of after the first steps."""
    run = open_run_dir(tmp_path, config={})
    with MetricsLog(run.metrics) as log:
        for step in range(10):
            learned = {"optim/entropy": 1.0, "optim/lr": 0.1} if step < 3 else {}
            done = {"test/reward/total": 0.5} if step in (0, 9) else {}
            reward = {"env/all/reward/total": 0.5, "rollout/stop/terminated": 1.0}
            log.write(step, {**learned, **reward, **done, "progress/done_frac": (step + 1) / 10})
    charts = re.findall("<svg viewBox.*?</svg>", write_report(tmp_path).read_text())
    axes = [[text for side, text in ticks(chart) if side == "middle"] for chart in charts]
    assert axes == [["0", "5", "10"]] * 5


def test_charts_survive_odd_numbers():
    nan = float("nan")
    assert line_chart([Series("<b>", [0, 1, 2, 3], [1.0, nan, 1e-9, 1e9])]).count("<polyline") == 2
    assert "nothing recorded" in line_chart([Series("a", [0.0], [nan])])
    assert "nothing recorded" in line_chart([])
    assert "nothing recorded" in area_chart([])
    assert "nothing recorded" in share_bar([("a", 0.0)], str)
    for chart in (
        line_chart([Series("<b>", [5], [0.0]), Series("&", [5], [0.0])]),
        area_chart([Series("<b>", [5], [0.4]), Series("&", [5], [nan])]),
        share_bar([("<b>", 1.0), ("&", 2.0)], str),
    ):
        assert "b" not in Page(chart).tags
