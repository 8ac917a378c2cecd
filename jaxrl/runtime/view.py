"""How a recorded episode is shown: as HTML for the report, as text for a terminal.

Knows the records of `record.py`. Text of models and environments is data: it is escaped, never parsed as HTML, as
terminal markup or as control codes. Sampled tokens are coloured by how surprising they were to the policy that
sampled them; tokens of the environment, which are masked in training, are grey.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from rich.style import Style
from rich.text import Text

from jaxrl.types import ENDINGS, StopReason

SHADES = 6
_SHADE_WIDTH = 0.8  # nats of surprise from one shade to the next; the first is a probability over 45 %
_TERMINAL_SHADES = (
    Style(),
    *(Style(color="#ffffff", bgcolor=shade) for shade in ("#4a3a12", "#66480c", "#835506", "#a36200", "#c46f00")),
)
_LONGEST = 3000  # characters of one observation, or tokens of one action, that are shown


class Piece(NamedTuple):
    """A stretch of sampled text: usually one token, more where several spell one character."""

    text: str
    shade: int
    about: str


def visible(text: str) -> str:
    """The text with control codes, direction overrides and lone surrogates made visible instead of obeyed."""
    return text.translate(_VISIBLE)


def _visible_table() -> dict[int, str]:
    controls = [code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"]
    directions = [0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
    shown = {code: f"\u27e8{code:02X}\u27e9" for code in (*controls, *directions)}
    return shown | dict.fromkeys(range(0xD800, 0xE000), "\ufffd")


_VISIBLE = _visible_table()


def pieces(turn: Mapping[str, Any]) -> Iterator[Piece]:
    """The sampled text of a turn in order, with what is known of each stretch."""
    waiting: list[tuple[int, float | None, int]] = []
    tokens = list(zip(turn["action"], turn["logprobs"], turn["versions"], turn["action_text"], strict=True))
    for i, (token, logprob, version, text) in enumerate(tokens):
        waiting.append((token, logprob, version))
        if text or i + 1 == len(tokens):
            yield Piece(visible(text), max(_shade(lp) for _, lp, _ in waiting), "\n".join(_about(*w) for w in waiting))
            waiting = []


def headline(record: Mapping[str, Any]) -> str:
    """One line about an episode."""
    turns = record["turns"]
    sampled = sum(len(t["action"]) for t in turns)
    task = f"{record['task']}, " if record["task"] else ""
    return f"step {record['step']}, {task}group {record['group']} member {record['member']}: {_count(turns, sampled)}"


def ending_kind(stop_reason: str) -> str:
    """ "good" (a regular end), "fault" (of the environment), or "cut" (by a budget, a bad form, a cancellation)."""
    reason = StopReason(stop_reason)
    if reason in (StopReason.TERMINATED, StopReason.ENV):
        return "good"
    return "fault" if ENDINGS[reason].fault else "cut"


def reward_text(reward: float | None) -> str:
    """A reward, None being one that was not finite."""
    return "not finite" if reward is None else f"{reward:.3g}"


def episode_html(record: Mapping[str, Any], *, label: str, is_open: bool = False) -> str:
    """One episode as a folding block. `label` says why it is shown."""
    stop = record["stop_reason"]
    summary = " ".join(
        (
            f'<span class="label">{escape(label)}</span>',
            f'<span class="reward">reward {reward_text(record["reward"])}</span>',
            f'<span class="chip {ending_kind(stop)}">{escape(stop)}</span>',
            f'<span class="quiet">{_clean(headline(record))}</span>',
        )
    )
    error = f'<p class="error">{_clean(record["error"])}</p>' if record["error"] else ""
    trained = record.get("trained", ENDINGS[StopReason(stop)].trained)
    untrained = "" if trained else '<p class="quiet">This episode was not trained on.</p>'
    body = "".join(_turn_html(i, turn) for i, turn in enumerate(record["turns"]))
    return f"<details{' open' * is_open}><summary>{summary}</summary>{error}{untrained}{body}</details>"


def episode_text(record: Mapping[str, Any]) -> Text:
    """One episode for a terminal, styled, nothing in it interpreted."""
    out = Text()
    out.append(visible(headline(record)) + "\n", style="bold")
    colour = {"good": "green", "cut": "yellow", "fault": "red"}[ending_kind(record["stop_reason"])]
    out.append(f"reward {reward_text(record['reward'])}  ").append(record["stop_reason"] + "\n", style=colour)
    if record["error"]:
        out.append(visible(record["error"]) + "\n", style="red")
    for i, turn in enumerate(record["turns"]):
        out.append(f"\n{_turn_title(i, turn)}\n", style="cyan")
        out.append(visible(_shortened(turn["observation_text"])) + "\n", style="bright_black")
        for piece in _limited(list(pieces(turn))):
            out.append(piece.text, style=_TERMINAL_SHADES[piece.shade])
        out.append("\n")
    return out


def choose(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """The best and the worst episode of a step, with what each is. One episode is only itself."""
    ranked = sorted(records, key=lambda r: math.inf if r["reward"] is None else -r["reward"])
    if len(ranked) < 2:
        return [("only episode", r) for r in ranked]
    return [("best", ranked[0]), ("worst", ranked[-1])]


def _turn_html(index: int, turn: Mapping[str, Any]) -> str:
    sampled = "".join(
        f'<span class="p{piece.shade}" title="{escape(piece.about)}">{escape(piece.text)}</span>'
        for piece in _limited(list(pieces(turn)))
    )
    said = {**turn["metrics"], **turn["logs"]}
    logs = "".join(f"<dt>{_clean(k)}</dt><dd>{_clean(_value(v))}</dd>" for k, v in said.items())
    return (
        f'<div class="turn"><h4>{_clean(_turn_title(index, turn))}</h4>'
        f'<pre class="masked">{_clean(_shortened(turn["observation_text"]))}</pre>'
        f'<pre class="sampled">{sampled}</pre>' + (f"<dl>{logs}</dl>" if logs else "") + "</div>"
    )


def _turn_title(index: int, turn: Mapping[str, Any]) -> str:
    parts = [f"turn {index + 1}", f"{len(turn['observation'])} + {len(turn['action'])} tokens"]
    if turn["reward"]:
        parts.append(f"reward {reward_text(turn['reward'])}")
    if turn["stop"] == "length":
        parts.append("cut by the token budget")
    if turn["rewrite"]:
        parts.append(f"history rewritten after {turn['kept']} tokens: {turn['rewrite']}")
    return " \u00b7 ".join(parts)


def _count(turns: Sequence[Any], sampled: int) -> str:
    return f"{len(turns)} turn{'s' * (len(turns) != 1)}, {sampled} sampled token{'s' * (sampled != 1)}"


def _shade(logprob: float | None) -> int:
    return SHADES - 1 if logprob is None else max(0, min(SHADES - 1, int(-logprob / _SHADE_WIDTH)))


def _about(token: int, logprob: float | None, version: int) -> str:
    chance = (
        "log-prob not finite" if logprob is None else f"log-prob {logprob:.3f} (p = {math.exp(min(logprob, 0)):.1%})"
    )
    return f"token {token}, {chance}, policy version {version}"


def _value(value: str | float | None) -> str:
    return value if isinstance(value, str) else reward_text(value)


def _clean(value: object) -> str:
    return escape(visible(str(value)))


def _shortened(text: str) -> str:
    """Long observations lose their middle."""
    cut = len(text) - _LONGEST
    return text if cut <= 0 else f"{text[: _LONGEST // 2]}\n[... {cut} characters ...]\n{text[-_LONGEST // 2 :]}"


def _limited(shown: list[Piece]) -> list[Piece]:
    rest = len(shown) - _LONGEST
    return shown if rest <= 0 else [*shown[:_LONGEST], Piece(f" [... {rest} more tokens]", 0, "")]
