"""A supervised warm start: demonstrations by an environment's scripted player, and a model that imitates them.

    python -m recipes.sft_warmup env=guess_number out=models/guesser
    python -m recipes.sft_warmup env=tool_use model_name=<model> out=models/caller steps=12 batch_size=4 \\
        learning_rate=1e-4

`out` becomes a model directory: the recipes take it as model_name=<out> (with warm_start=None). All weights are
trained. Nothing is learned here by trying; that is what the RL recipes are for.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import chz
import jax.numpy as jnp
import numpy as np

from jaxrl.chat.families import renderer_for
from jaxrl.chat.renderer import Renderer
from jaxrl.chat.supervised import supervise
from jaxrl.runtime.learner import Packing
from jaxrl.runtime.policy import check_policy, load_policy, policy_config, policy_tokenizer, save_policy
from jaxrl.runtime.warm_start import Demonstrator, WarmStart, run_warm_start
from jaxrl.train import one_line_errors
from recipes.guess_number import PoorPlayer
from recipes.tool_use import ScriptedPlayer

PLAYERS: dict[str, Demonstrator] = {"guess_number": PoorPlayer(), "tool_use": ScriptedPlayer()}


@chz.chz
class SftConfig:
    """What is imitated, by which model, and where the result goes."""

    env: Literal["guess_number", "tool_use"] = chz.field(doc="whose scripted player demonstrates")
    out: str = chz.field(doc="directory of the model to write; must not exist")
    model_name: str = chz.field(default="tiny", doc="Hugging Face directory or hub id, a .gguf file, or 'tiny'")
    demonstrator: Demonstrator | None = chz.field(default=None, doc="None is the player of the env's RL recipe")
    steps: int = chz.field(default=150, doc="optimizer steps")
    batch_size: int = chz.field(default=64, doc="demonstrations a step")
    learning_rate: float = chz.field(default=3e-3, doc="peak of a cosine; a pretrained model wants about 1e-4")
    rows: int = chz.field(default=8, doc="rows of a micro-batch: fewer take less memory")
    remat: bool = chz.field(default=True, doc="compute activations again in the backward pass; False is faster")
    seed: int = chz.field(default=0, doc="of the demonstrations, and of the weights of 'tiny'")


def main(config: SftConfig) -> Path:
    """Train as `config` says and return the model directory, which holds the metrics too.

    Errors: FileExistsError when `out` exists; ValueError and FileNotFoundError for a model that cannot be used. All
    of them come before a weight is read.
    """
    out = Path(config.out).expanduser()
    if out.exists():
        raise FileExistsError(f"out={out} exists already; give a new directory, or remove this one first")
    player = config.demonstrator or PLAYERS[config.env]
    warm_start = WarmStart(player, config.steps, config.batch_size, config.learning_rate)
    positions = policy_config(config.model_name).max_positions
    tokenizer = policy_tokenizer(config.model_name)
    renderer = renderer_for(tokenizer)
    width = longest_demonstration(player, renderer)
    if width > positions:
        raise ValueError(
            f"demonstrations of {config.env} take up to {width} tokens, more than the {positions} positions of "
            f"{config.model_name}; give a model with a longer context"
        )
    check_policy(config.model_name)

    part = out.with_name(out.name + ".part")  # so that `out` is whole or absent
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    model, params = load_policy(config.model_name, dtype=jnp.float32, seed=config.seed)
    params = run_warm_start(
        warm_start,
        model,
        params,
        renderer,
        packing=Packing((width,), config.rows),
        seed=config.seed,
        log=part / "metrics.jsonl",
        remat=config.remat,
    )
    save_policy(part / "model", model, params, config.model_name)
    (part / "metrics.jsonl").rename(part / "model" / "metrics.jsonl")
    (part / "model").rename(out)
    part.rmdir()
    return out


def longest_demonstration(player: Demonstrator, renderer: Renderer, *, looks: int = 64, margin: int = 32) -> int:
    """The length of the longest of some demonstrations, with a margin for those that were not looked at."""
    shown = [player.play(np.random.default_rng(i)) for i in range(looks)]
    lengths = [len(s.tokens) for each in shown for s in supervise(renderer, each.messages, each.tools)]
    return max(lengths) + margin


def command(arguments: Sequence[str]) -> None:
    """Run `main` with key=value arguments and say how to go on."""
    with one_line_errors():
        config = chz.Blueprint(SftConfig).make_from_argv(list(arguments))
        try:
            out = main(config)
        except FileExistsError as error:
            raise ValueError(str(error)) from None
        print(f"model: {out}\ntrain it: python -m recipes.{config.env} model_name={out} warm_start=None")


if __name__ == "__main__":
    command(sys.argv[1:])
