"""Shorter answers: of two well-formed answers the shorter is preferred, and RL from these preferences finds it out.

    python -m recipes.shorter_answers                       a tiny model, built and warm-started in place

    python -m recipes.shorter_answers model_name=<model> warm_start=None dataset_builder.prompts=prompts.jsonl \\
        max_tokens=256 engine.context=1024 engine.position_buckets=1024 packing=None learning_rate=1e-4
    ... dataset_builder.judge=model dataset_builder.judge_model=<name> \\
        dataset_builder.judge_url=https://api.example.com/v1
    ... dataset_builder.judge=checkpoint dataset_builder.judge_model=<model> dataset_builder.judge_reference=<model>

A batch is groups of answers to one prompt. No answer is scored on its own: all pairs of a group are compared, in both
orders, and an answer's reward is its wins less its losses. The tiny model is asked for opposites; its warm start shows
right answers of five lengths, equally often. What counts is whether the answers get shorter and stay right.

With other prompts, and a judge that is a hosted model or a checkpoint, this is the usual learning from preferences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from envs import preference
from envs.preference import Comparison, Conversation, Judge, PairwisePreferenceGroupBuilder, Shorter, well_formed
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.chat.renderer import Outcome as Ended
from jaxrl.chat.renderer import Renderer
from jaxrl.env import GroupDataset, RLDataset, RLDatasetBuilder
from jaxrl.models.lora import LoraConfig
from jaxrl.runtime.engine import EngineConfig
from jaxrl.runtime.learner import Packing
from jaxrl.runtime.message_env import EnvFromMessageEnv, TurnRules
from jaxrl.runtime.opponents import Hosted
from jaxrl.runtime.policy import policy_tokenizer
from jaxrl.runtime.record import read_records
from jaxrl.runtime.reward_model import CheckpointScore
from jaxrl.runtime.warm_start import Demonstration, Demonstrator, WarmStart
from jaxrl.train import Config, command, config_renderer
from jaxrl.types import Message, Task


@dataclass(frozen=True)
class ShorterAnswers(RLDatasetBuilder):
    """`batch_size` prompts a step, `group_size` answers to each; `test_prompts` held out, one answer to each.

    prompts: JSON lines with a "prompt", perhaps a "reference" answer, and perhaps "follow_ups", texts of the user that
    are answered too (then max_turns has to allow for them); None asks for opposites. judge: "shorter", "model" for one
    behind an endpoint, "checkpoint" for the likelihood under judge_model, less that under judge_reference.
    judge_key_env: the variable that holds the endpoint's key. Held-out answers are compared with the reference answer,
    so their win_rate says how often they are better than that; those of a file without one get their form only.
    """

    prompts: str | None = None
    judge: Literal["shorter", "model", "checkpoint"] = "shorter"
    judge_url: str | None = None
    judge_model: str | None = None
    judge_reference: str | None = None
    judge_key_env: str | None = None
    judges_at_once: int = 16
    pattern: preference.Pattern = "all_pairs_both_ways"
    matchup_group_size: int | None = None
    scale: preference.Scale = "plus_minus"
    format_coef: float = 1.0
    batch_size: int = 8
    group_size: int = 8
    steps: int = 40
    test_prompts: int = 48
    seed: int = 0

    def __post_init__(self) -> None:
        needed = {"shorter": (), "model": ("judge_url", "judge_model"), "checkpoint": ("judge_model",)}[self.judge]
        taken = {"model": (*needed, "judge_key_env"), "checkpoint": (*needed, "judge_reference")}
        for name in ("judge_url", "judge_model", "judge_reference", "judge_key_env"):
            if name in needed and getattr(self, name) is None:
                raise ValueError(f"dataset_builder.judge={self.judge} needs dataset_builder.{name}")
            if name not in taken.get(self.judge, ()) and getattr(self, name) is not None:
                raise ValueError(f"dataset_builder.{name} has no effect with judge={self.judge}; leave it out")
        for name in ("batch_size", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"dataset_builder.{name}={getattr(self, name)}: expected at least 1")

    async def __call__(self, renderer: Renderer) -> tuple[RLDataset, RLDataset | None]:
        """The prompts in a new order every time they are through; the same held-out ones at every evaluation."""
        lift = partial(EnvFromMessageEnv, renderer=renderer, rules=TurnRules(failed_parse_reward=0.0))
        group = partial(self._group, lift=lift, judge=self._judge())
        train, test = self._tasks()
        rng = np.random.default_rng(self.seed)
        count = self.batch_size * self.steps
        order = [i for _ in range(-(-count // len(train))) for i in rng.permutation(len(train))][:count]
        groups = [group(train[i], group_size=self.group_size) for i in order]
        held_out = [group(task, group_size=1) for task in test]
        return GroupDataset(groups, self.batch_size), GroupDataset(held_out, len(held_out)) if held_out else None

    def _tasks(self) -> tuple[Sequence[Task], Sequence[Task]]:
        if self.prompts is None:
            middle = len(preference.ANSWERS) // 2
            asked = [
                Task(preference.question(word), target=preference.opposite(word, middle))
                for word in preference.OPPOSITES
            ]
            return asked, [asked[i % len(asked)] for i in range(self.test_prompts)]
        tasks = preference.read_prompts(self.prompts)
        if self.test_prompts >= len(tasks):
            raise ValueError(
                f"dataset_builder.test_prompts={self.test_prompts}: {self.prompts} has {len(tasks)} prompts, which "
                "leaves none to train on; hold out fewer"
            )
        order = np.random.default_rng((self.seed, 1)).permutation(len(tasks))
        return [tasks[i] for i in order[self.test_prompts :]], [tasks[i] for i in order[: self.test_prompts]]

    def _judge(self) -> Judge | None:
        """The judge of all prompts; None where each has its own."""
        if self.judge == "checkpoint":
            assert self.judge_model is not None
            return preference.RewardModelJudge(CheckpointScore(self.judge_model, self.judge_reference))
        if self.judge == "model":
            assert self.judge_url is not None
            assert self.judge_model is not None
            hosted = partial(Hosted, self.judge_url, self.judge_model, self.judge_key_env, temperature=0.0)
            return preference.ModelJudge(hosted)
        return None

    def _group(
        self, task: Task, *, lift: preference.Lift, judge: Judge | None, group_size: int
    ) -> PairwisePreferenceGroupBuilder:
        formed = well_formed(task.prompt)
        return PairwisePreferenceGroupBuilder(
            task,
            lift,
            group_size,
            judge or preference.FunctionJudge(Shorter(formed)),
            pattern=self.pattern,
            matchup_group_size=self.matchup_group_size,
            scale=self.scale,
            format_coef=self.format_coef,
            check_format=formed,
            references=(task.target,) if group_size == 1 and task.target else (),
            judging=preference.Judging(limit=preference.Limit("judge", self.judges_at_once)),
        )


@dataclass(frozen=True)
class Chatterbox(Demonstrator):
    """Answers rightly, at any of the five lengths."""

    def play(self, rng: np.random.Generator) -> Demonstration:
        """One question and one answer."""
        word = list(preference.OPPOSITES)[int(rng.integers(len(preference.OPPOSITES)))]
        said = preference.opposite(word, int(rng.integers(len(preference.ANSWERS))))
        return Demonstration([Message("user", preference.question(word)), Message("assistant", said)])


DEFAULTS = {
    "dataset_builder": ShorterAnswers(),
    "model_name": "tiny",
    "warm_start": WarmStart(Chatterbox(), steps=100, batch_size=32, learning_rate=2e-3),
    "log_path": "runs/shorter_answers",
    "learning_rate": 5e-4,
    "lora": LoraConfig(rank=16, alpha=16.0),
    "optimizer": OptimizerConfig(max_grad_norm=100.0),
    "max_tokens": 36,
    "max_turns": 1,
    "eval_every": 20,
    "num_groups_to_log": 48,
    "engine": EngineConfig(
        slots=64,
        context=65,
        prompts=0,
        prompt_context=1,
        decode_steps=8,
        extend_lengths=(32,),
        row_buckets=(64,),
        position_buckets=(65,),
    ),
    "packing": Packing(widths=(96,), rows=8),
    "remat": False,
}


@dataclass(frozen=True)
class Outcome:
    """The held-out answers of the first evaluation and of the last, and how often the last win against the first.

    length: characters of a well-formed answer, nan without one. formed: the share of such. win_rate: a tie is a half.
    """

    length: tuple[float, float]
    formed: tuple[float, float]
    win_rate: float


def outcome(run: Path, renderer: Renderer) -> Outcome:
    """What a finished run has recorded of its held-out prompts. Raises ValueError when it has held out none."""
    files = sorted((run / "rollouts").glob("test_*.jsonl"))
    if not files:
        raise ValueError(f"{run} has no held-out answers to compare")
    sides = [[(record["task"], _said(record, renderer)) for record in read_records(file)] for file in files]
    before, after = sides[0], sides[-1]
    formed = [[text for prompt, text in said if well_formed(prompt)(text)] for said in (before, after)]
    lengths = [float(np.mean([len(text) for text in texts])) if texts else float("nan") for texts in formed]
    shares = [
        Shorter(well_formed(prompt))(Comparison((), _spoke(last), _spoke(first))).first
        for (prompt, first), (_, last) in zip(before, after, strict=True)
    ]
    return Outcome(
        length=(lengths[0], lengths[1]),
        formed=(len(formed[0]) / len(before), len(formed[1]) / len(after)),
        win_rate=float(np.mean(shares)),
    )


def _said(record: Mapping[str, Any], renderer: Renderer) -> str:
    """The last response; "" when it was cut or could not be read."""
    parsed = renderer.parse(record["turns"][-1]["action"]) if record["turns"] else None
    return parsed.message.content if parsed is not None and parsed.outcome is Ended.STOPPED else ""


def _spoke(text: str) -> Conversation:
    return (Message("assistant", text),)


def check_goes_together(config: Config) -> None:
    """Raise ValueError when the warm start answers other questions than those to train on."""
    data, shown = config.dataset_builder, config.warm_start and config.warm_start.demonstrator
    if isinstance(shown, Chatterbox) and isinstance(data, ShorterAnswers) and data.prompts is not None:
        raise ValueError(
            f"dataset_builder.prompts={data.prompts}, but the warm start shows opposites: set warm_start=None"
        )


def say_how_it_went(config: Config, run: Path) -> None:
    """Print what became of the held-out answers, where the shorter one is what was wanted."""
    data = config.dataset_builder
    if isinstance(data, ShorterAnswers) and data.judge == "shorter" and data.test_prompts:
        found = outcome(run, config_renderer(config, policy_tokenizer(config.model_name)))
        print(
            f"held-out answers: {found.length[0]:.1f} characters before training, {found.length[1]:.1f} after; "
            f"well-formed {found.formed[0]:.2f} before, {found.formed[1]:.2f} after; the later ones win "
            f"{found.win_rate:.2f} of the comparisons with those before"
        )


if __name__ == "__main__":
    command(DEFAULTS, check=check_goes_together, afterwards=say_how_it_went)
