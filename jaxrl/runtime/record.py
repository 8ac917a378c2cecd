"""Recorded episodes: rollouts/step_NNNNNN.jsonl, one line an episode, every token with its log-prob and version.

Knows trajectories and JSON, and decodes tokens only to show them: nothing is ever trained from the text. It must
not know renderers, nor how an episode is displayed (`view.py`).

A line (schema 1): step, group, member, task, tags, reward (step rewards plus group reward), stop_reason, error,
metrics, and turns. A turn holds `kept`, how many tokens of the context so far go on, `rewrite`, why not all of
them did, `observation`, the tokens the environment added after those, and the sampled `action` with `logprobs` and
`versions`. The training mask is implied: actions are sampled tokens, observations are not; a `masked` turn is
context only, and of an episode that is not `trained` nothing is.

`groups_from_records` makes groups of them again, to train on once more. `group_to_json` keeps a whole group instead,
for a checkpoint.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl.runtime.log import read_lines
from jaxrl.runtime.run_dir import write_atomic
from jaxrl.types import (
    Conclusion,
    RolloutError,
    Sample,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    Transition,
    common_prefix,
)

SCHEMA = 1

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens visible."""

_LONGEST_CHARACTER = 4  # bytes of UTF-8, hence the most byte tokens that can wait for each other


def rollout_file(folder: str | Path, step: int, *, kind: str = "step") -> Path:
    """Where the episodes of a step lie; `kind="test"` for those of a held-out evaluation."""
    return Path(folder) / f"{kind}_{step:06d}.jsonl"


def episode_records(
    groups: Iterable[TrajectoryGroup], decode: Decode, *, step: int, tasks: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """The JSON-able records of every episode of the groups. `tasks` names the task of each group."""
    return [
        {
            "schema": SCHEMA,
            "step": step,
            "group": g,
            "member": m,
            "task": None if tasks is None else tasks[g],
            "tags": list(group.tags),
            "reward": _finite(reward),
            "stop_reason": trajectory.stop_reason.value,
            "error": trajectory.error,
            "trained": group.viable and trajectory.ending.trained,
            "metrics": _values({**(trajectory.conclusion.metrics if trajectory.conclusion else {}), **metrics}),
            "turns": _turns(trajectory, decode),
        }
        for g, group in enumerate(groups)
        for m, (trajectory, reward, metrics) in enumerate(
            zip(group.trajectories_G, group.rewards_G, group.metrics_G, strict=True)
        )
    ]


def write_records(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of episodes whole, replacing an older one. Makes its folder. Raises OSError."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(r, allow_nan=False, ensure_ascii=False) + "\n" for r in records)
    write_atomic(path, text.encode("utf-8", "replace").decode())  # a task may hold lone surrogates


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The episodes of a file; a torn last line is left out. Raises ValueError for a schema this code cannot read."""
    records = read_lines(Path(path))
    for record in records:
        if record.get("schema") != SCHEMA:
            raise ValueError(
                f"{Path(path).name} has schema {record.get('schema')}, this version of jaxrl reads schema {SCHEMA}; "
                f"versions.json of the run says which version wrote it"
            )
    return records


def contexts(record: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The whole context each turn was sampled from, rebuilt token for token."""
    context: tuple[int, ...] = ()
    seen = []
    for turn in record["turns"]:
        seen.append(context[: turn["kept"]] + tuple(turn["observation"]))
        context = seen[-1] + tuple(turn["action"])
    return seen


def groups_from_records(records: Iterable[Mapping[str, Any]]) -> list[TrajectoryGroup]:
    """The groups of one step's records, in order; they give the same datums as the groups that were recorded.

    What a record does not hold is left empty: errors of attempts that were retried, and which metrics were the
    group's. A number that was not finite is NaN. Raises ValueError when members of a group are missing.
    """
    by_group: dict[int, list[Mapping[str, Any]]] = {}
    for record in records:
        by_group.setdefault(record["group"], []).append(record)
    return [_recorded_group(number, by_group[number]) for number in sorted(by_group)]


def _recorded_group(number: int, records: Sequence[Mapping[str, Any]]) -> TrajectoryGroup:
    members_G = sorted(records, key=lambda r: r["member"])
    if [r["member"] for r in members_G] != list(range(len(members_G))):
        raise ValueError(
            f"group {number} of step {members_G[0]['step']} has records of members {[r['member'] for r in members_G]}, "
            "but an advantage compares all members: the file was cut, or holds several steps"
        )
    trajectories_G = tuple(_recorded_trajectory(r) for r in members_G)
    refused = any(t.ending.trained and not r["trained"] for t, r in zip(trajectories_G, members_G, strict=True))
    return TrajectoryGroup(
        trajectories_G=trajectories_G,
        rewards_G=tuple(_number(r["reward"]) for r in members_G),
        metrics_G=tuple(r["metrics"] for r in members_G),
        tags=tuple(members_G[0]["tags"]),
        viable=not refused,
    )


def _recorded_trajectory(record: Mapping[str, Any]) -> Trajectory:
    reason = StopReason(record["stop_reason"])
    graded = reason is StopReason.TIMEOUT and record["trained"]  # only a conclusion lets a timeout be trained
    turns = zip(contexts(record), record["turns"], strict=True)
    return Trajectory(
        transitions=tuple(_recorded_turn(context, turn) for context, turn in turns),
        stop_reason=reason,
        error=record["error"],
        conclusion=Conclusion() if graded else None,
    )


def _recorded_turn(context: tuple[int, ...], turn: Mapping[str, Any]) -> Transition:
    logprobs = tuple(_number(x) for x in turn["logprobs"])
    return Transition(
        observation=context,
        action=Sample(tuple(turn["action"]), logprobs, tuple(turn["versions"]), turn["stop"]),
        reward=_number(turn["reward"]),
        episode_done=turn["done"],
        metrics=turn["metrics"],
        logs=turn["logs"],
        rewrite=turn["rewrite"],
        masked=turn["masked"],
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def group_to_json(group: TrajectoryGroup) -> dict[str, Any]:
    """A group as JSON-able values, from which `group_from_json` makes it again, to the last bit."""
    return json.loads(json.dumps(dataclasses.asdict(group), default=_plain))


def group_from_json(value: Mapping[str, Any]) -> TrajectoryGroup:
    """The group that `group_to_json` kept."""
    return TrajectoryGroup(
        trajectories_G=tuple(_trajectory(t) for t in value["trajectories_G"]),
        rewards_G=tuple(value["rewards_G"]),
        metrics_G=tuple(value["metrics_G"]),
        tags=tuple(value["tags"]),
        errors=tuple(RolloutError(**{**e, "stop_reason": StopReason(e["stop_reason"])}) for e in value["errors"]),
        viable=value["viable"],
    )


def _trajectory(value: Mapping[str, Any]) -> Trajectory:
    conclusion = value["conclusion"]
    return Trajectory(
        transitions=tuple(_transition(t) for t in value["transitions"]),
        stop_reason=StopReason(value["stop_reason"]),
        error=value["error"],
        conclusion=None if conclusion is None else Conclusion(**conclusion),
    )


def _transition(value: Mapping[str, Any]) -> Transition:
    sample = value["action"]
    lists = {name: tuple(sample[name]) for name in ("tokens", "logprobs", "versions")}
    action = Sample(**lists, stop=sample["stop"])
    return Transition(**{**value, "observation": tuple(value["observation"]), "action": action})


def _plain(value: Any) -> Any:
    """Enum members by value, numpy numbers as Python's."""
    return value.value if isinstance(value, StopReason) else value.item()


def token_pieces(tokens: Sequence[int], decode: Decode) -> list[str]:
    """One piece of text a token; where the text is valid, they concatenate to it.

    A character that several byte tokens spell is the piece of the last of them. Each token is decoded after the one
    before it, because some tokenizers drop the space in front of a first word.
    """
    pieces: list[str] = []
    previous = done = 0
    for i in range(len(tokens)):
        text = decode(tokens[previous : i + 1])
        unfinished = text.endswith("\ufffd") and i + 1 - done < _LONGEST_CHARACTER and i + 1 < len(tokens)
        if unfinished:
            pieces.append("")
        else:
            pieces.append(text[len(decode(tokens[previous:done])) :])
            previous, done = done, i + 1
    return pieces


def _turns(trajectory: Trajectory, decode: Decode) -> list[dict[str, Any]]:
    context: tuple[int, ...] = ()
    turns = []
    for transition in trajectory.transitions:
        kept = common_prefix(context, transition.observation)
        turns.append(_turn(transition, kept, decode))
        context = transition.observation + transition.action.tokens
    return turns


def _turn(transition: Transition, kept: int, decode: Decode) -> dict[str, Any]:
    added, action = transition.observation[kept:], transition.action
    return {
        "kept": kept,
        "rewrite": transition.rewrite,
        "observation": [int(t) for t in added],
        "observation_text": decode(added),
        "action": [int(t) for t in action.tokens],
        "action_text": token_pieces(action.tokens, decode),
        "logprobs": [_finite(x) for x in action.logprobs],
        "versions": [int(v) for v in action.versions],
        "stop": action.stop,
        "reward": _finite(transition.reward),
        "done": transition.episode_done,
        "masked": transition.masked,
        "metrics": _values(transition.metrics),
        "logs": _values(transition.logs),
    }


def _values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, str) else _finite(value) for name, value in values.items()}


def _finite(value: float) -> float | None:
    """Nine digits give a float32 back exactly; JSON has no NaN and no infinity."""
    return float(f"{value:.9g}") if math.isfinite(value) else None
