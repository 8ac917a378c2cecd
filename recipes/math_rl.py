"""Mathematics with one answer a question: a tiny model learns sums by heart, a pretrained one what your file asks.

    python -m recipes.math_rl                         a tiny model, built in place, learns one-digit sums by heart
    python -m recipes.math_rl dataset_builder.test_on=held_out           ... and is asked those it never saw
    python -m recipes.math_rl model_name=<model> warm_start=None max_tokens=512 engine.context=1024 packing=None \\
        dataset_builder=ProblemFiles dataset_builder.train=gsm8k.jsonl dataset_builder.answer_in=hashes
    ... dataset_builder=ProblemFiles dataset_builder.train=math.jsonl dataset_builder.question=problem \\
        dataset_builder.answer=solution dataset_builder.answer_in=boxed dataset_builder.symbolic=True
    ... dataset_builder=GymProblems dataset_builder.name=chain_sum          (pip install 'jaxrl[reasoning-gym]')

The warm start of the tiny model imitates a sloppy pupil, who knows the form and is off by one or by ten in most sums.
So right answers are among those the model gives, and which they are is what the reward finds. A model this small
learns each sum by heart and not how to add, so evaluations ask the sums it trains on (test_on); held-out ones, which
occur in neither part of the training, stay wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from envs import problems
from envs.problems import FORMS, Form, RowFormat
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.chat.renderer import Renderer
from jaxrl.env import GroupDataset, RLDataset, RLDatasetBuilder
from jaxrl.models.lora import LoraConfig
from jaxrl.runtime.engine import EngineConfig
from jaxrl.runtime.learner import Packing
from jaxrl.runtime.problem import Problem, ProblemGroupBuilder
from jaxrl.runtime.warm_start import Demonstration, Demonstrator, WarmStart, check_same_settings
from jaxrl.train import Config, command
from jaxrl.types import Message


@dataclass(frozen=True)
class Arithmetic(RLDatasetBuilder):
    """`batch_size` problems a step, `group_size` answers to each, `test_problems` at an evaluation.

    instruct: a system prompt says how to mark the answer, which a pretrained model has to be told. test_on: which
    problems evaluations ask, `held_out` ones, which are never trained on, or the first of those `trained` on.
    """

    operations: tuple[str, ...] = ("+",)
    digits: tuple[int, ...] = (1,)
    form: Form = "boxed"
    instruct: bool = False
    batch_size: int = 16
    group_size: int = 8
    steps: int = 100
    test_problems: int = 128
    test_on: Literal["held_out", "trained"] = "held_out"
    format_coef: float = 0.1
    seed: int = 0

    async def __call__(self, renderer: Renderer) -> tuple[RLDataset, RLDataset | None]:
        """Fresh problems every step; the same ones at every evaluation."""
        kind = {"seed": self.seed, "operations": self.operations, "digits": self.digits, "form": self.form}
        train = problems.arithmetic("train", self.batch_size * self.steps, **kind)
        test = problems.arithmetic("test" if self.test_on == "held_out" else "train", self.test_problems, **kind)
        system = FORMS[self.form].instruction if self.instruct else None
        group = partial(ProblemGroupBuilder, renderer=renderer, system=system, format_coef=self.format_coef)
        return _datasets(train, test, group, self.batch_size, self.group_size)


@dataclass(frozen=True)
class ProblemFiles(RLDatasetBuilder):
    """Problems from JSON lines, shuffled by `seed`; the fields are those of `RowFormat`.

    test: another such file; without it `test_problems` rows are held out of the training file, with it the first so
    many of it are used. overlap: what becomes of a training question that is a test question too. The system prompt
    says how to mark the answer, unless `system` says something else.
    """

    train: str
    test: str | None = None
    question: str = "question"
    answer: str = "answer"
    answer_in: Form = "plain"
    form: Form = "boxed"
    symbolic: bool = False
    overlap: Literal["refuse", "drop"] = "refuse"
    batch_size: int = 16
    group_size: int = 8
    epochs: int = 1
    test_problems: int = 128
    format_coef: float = 0.1
    system: str | None = None
    seed: int = 0

    async def __call__(self, renderer: Renderer) -> tuple[RLDataset, RLDataset | None]:
        """Every training problem once an epoch, each epoch in another order."""
        train, test = self._rows()
        rng = np.random.default_rng(self.seed)
        order = [int(i) for _ in range(self.epochs) for i in rng.permutation(len(train))]
        system = FORMS[self.form].instruction if self.system is None else self.system
        group = partial(ProblemGroupBuilder, renderer=renderer, system=system, format_coef=self.format_coef)
        shuffled = [train[i].problem for i in order]
        return _datasets(shuffled, [row.problem for row in test], group, self.batch_size, self.group_size)

    def _rows(self) -> tuple[list[problems.Row], list[problems.Row]]:
        row_format = RowFormat(self.question, self.answer, self.answer_in, self.form, self.symbolic)
        rows = problems.read_problems(self.train, row_format)
        if self.test is not None:
            test = problems.read_problems(self.test, row_format)[: self.test_problems]
            return problems.keep_apart(rows, test, self.overlap)
        if self.test_problems >= len(rows):
            raise ValueError(
                f"dataset_builder.test_problems={self.test_problems}: {self.train} has {len(rows)} problems, which "
                "leaves none to train on; hold out fewer, or name a file with dataset_builder.test"
            )
        order = np.random.default_rng([self.seed, 1]).permutation(len(rows))
        held_out = {int(i) for i in order[: self.test_problems]}
        return [row for i, row in enumerate(rows) if i not in held_out], [rows[i] for i in sorted(held_out)]


@dataclass(frozen=True)
class GymProblems(RLDatasetBuilder):
    """Problems of one dataset of reasoning-gym, by `name`; held-out ones that training has too are dropped.

    partial_credit: count what its scorer gives to answers that are not quite right.
    """

    name: str
    form: Form = "tags"
    partial_credit: bool = False
    batch_size: int = 16
    group_size: int = 8
    steps: int = 100
    test_problems: int = 128
    format_coef: float = 0.1
    system: str | None = None
    seed: int = 0

    async def __call__(self, renderer: Renderer) -> tuple[RLDataset, RLDataset | None]:
        """Training and held-out problems of two seeds."""
        make = partial(problems.gym_problems, self.name, form=self.form, partial_credit=self.partial_credit)
        train = make(self.batch_size * self.steps, seed=2 * self.seed)
        seen = {problem.question for problem in train}
        drawn = make(self.test_problems, seed=2 * self.seed + 1)
        test = [problem for problem in drawn if problem.question not in seen]
        if drawn and not test:
            raise ValueError(f"reasoning-gym's {self.name!r} has so few problems that none is left to hold out")
        system = FORMS[self.form].instruction if self.system is None else self.system
        group = partial(ProblemGroupBuilder, renderer=renderer, system=system, format_coef=self.format_coef)
        return _datasets(train, test, group, self.batch_size, self.group_size)


def _datasets(
    train: Sequence[Problem],
    test: Sequence[Problem],
    group: partial[ProblemGroupBuilder],
    batch_size: int,
    group_size: int,
) -> tuple[RLDataset, RLDataset | None]:
    """Groups of `group_size` to train on; one attempt at each held-out problem, all in one batch."""
    groups = [group(problem, group_size=group_size) for problem in train]
    held_out = [group(problem, group_size=1) for problem in test]
    return GroupDataset(groups, batch_size), GroupDataset(held_out, len(held_out)) if held_out else None


@dataclass(frozen=True)
class SloppyPupil(Demonstrator):
    """Answers a random training problem in the right form: right in a `right` share of them, else off by 1 or 10."""

    operations: tuple[str, ...] = ("+",)
    digits: tuple[int, ...] = (1,)
    form: Form = "boxed"
    right: float = 0.4

    def __post_init__(self) -> None:
        if not 0.0 <= self.right <= 1.0:
            raise ValueError(f"right={self.right}: expected a share, 0 <= right <= 1")

    def play(self, rng: np.random.Generator) -> Demonstration:
        """One question and one answer."""
        kind = {"operations": self.operations, "digits": self.digits, "form": self.form}
        (problem,) = problems.arithmetic("train", 1, seed=int(rng.integers(2**31)), **kind)
        error = 0 if rng.random() < self.right else int(rng.choice([-10, -1, 1, 10]))
        said = FORMS[self.form].write(str(int(problem.reference_answer) + error))
        return Demonstration([Message("user", problem.question), Message("assistant", said)])


DEFAULTS = {
    "dataset_builder": Arithmetic(test_on="trained"),
    "model_name": "tiny",
    "warm_start": WarmStart(SloppyPupil(), steps=180, batch_size=32, learning_rate=2e-3),
    "log_path": "runs/math_rl",
    "learning_rate": 1e-3,
    "lora": LoraConfig(rank=16, alpha=16.0),
    "optimizer": OptimizerConfig(max_grad_norm=100.0),  # a batch with one group to learn from takes a small step
    "max_tokens": 16,
    "max_turns": 1,
    "eval_every": 20,
    "engine": EngineConfig(
        slots=128,
        context=65,
        prompts=0,  # a dozen tokens are not worth programs of their own
        prompt_context=1,
        decode_steps=8,
        extend_lengths=(16, 32),
        row_buckets=(128,),
        position_buckets=(65,),
    ),
    "packing": Packing(widths=(64,), rows=8),
    "remat": False,
}


def check_goes_together(config: Config) -> None:
    """Raise ValueError when the pupil of the warm start answers other questions than those to train on."""
    data, pupil = config.dataset_builder, config.warm_start and config.warm_start.demonstrator
    if not isinstance(pupil, SloppyPupil):
        return
    if not isinstance(data, Arithmetic):
        raise ValueError(
            f"dataset_builder={type(data).__name__}, but the warm start shows arithmetic: set warm_start=None"
        )
    check_same_settings(data, pupil, ("operations", "digits", "form"), "other problems")


if __name__ == "__main__":
    command(DEFAULTS, check=check_goes_together)
