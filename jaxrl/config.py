"""What a run depends on: `Config`, made of defaults and key=value arguments, and told again as JSON-able values.

Knows every option, its default and its meaning. What goes together, and with which model and data, is `jaxrl.plan`'s
to say.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import chz

from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.algo.shaping import Shaping
from jaxrl.algo.variants import VARIANTS
from jaxrl.chat.families import renderer_for
from jaxrl.chat.renderer import Renderer
from jaxrl.chat.tokenizer import Tokenizer
from jaxrl.env import RLDatasetBuilder
from jaxrl.models.lora import LoraConfig
from jaxrl.runtime.lag import SamplerGap
from jaxrl.runtime.learner import MeshShape, Packing
from jaxrl.runtime.schedule import EngineConfig
from jaxrl.runtime.strategy import FailFast, Strategy
from jaxrl.runtime.warm_start import Demonstrator, WarmStart
from jaxrl.settings import at_least


@dataclasses.dataclass(frozen=True)
class StreamMinibatchConfig:
    """Streaming, still on-policy: a step's gradient is taken this many groups at a time, as they finish."""

    groups_per_minibatch: int

    def __post_init__(self) -> None:
        at_least("stream_minibatch.groups_per_minibatch", self.groups_per_minibatch, 1)


@dataclasses.dataclass(frozen=True)
class AsyncConfig:
    """Asynchronous: groups of later steps play while a step trains.

    max_steps_off_policy: no token is older than this when it is trained. groups_per_batch: groups a step.
    in_flight_updates: a group under way goes on with newly published weights (what becomes of its keys and values is
    engine.on_publish); else it ends with the weights it started with.
    """

    max_steps_off_policy: int
    groups_per_batch: int
    in_flight_updates: bool = True

    def __post_init__(self) -> None:
        at_least("off_policy.max_steps_off_policy", self.max_steps_off_policy, 1)
        at_least("off_policy.groups_per_batch", self.groups_per_batch, 1)


@chz.chz(typecheck=True)
class Config:
    """Everything a run depends on. Nested fields are set with dots: optimizer.schedule=cosine."""

    model_name: str = chz.field(doc="Hugging Face directory or hub id, a .gguf file, or 'tiny'")
    dataset_builder: RLDatasetBuilder | None = chz.field(default=None, doc="what to train on, and what to hold out")
    log_path: str = chz.field(doc="directory of the run")
    behavior_if_log_dir_exists: Literal["ask", "resume", "delete", "raise"] = chz.field(
        default="ask", doc="when log_path holds a run already"
    )
    max_steps: int | None = chz.field(default=None, doc="steps, a batch each; None is one pass over the training data")
    learning_rate: float | None = chz.field(default=None, doc="peak learning rate of Adam; None suits the model's size")
    optimizer: OptimizerConfig = chz.field(default_factory=OptimizerConfig, doc="schedule, clipping, decay")
    lora: LoraConfig | None = chz.field(default_factory=LoraConfig, doc="the adapter; None trains all weights")
    warm_start: WarmStart | None = chz.field(default=None, doc="supervised steps on all weights before the RL")
    loss_fn: str = chz.field(
        default="importance_sampling", doc=f"one of {', '.join(VARIANTS)}; or package.module:function, your own"
    )
    loss_fn_config: dict[str, int | float | str] = chz.field(
        default_factory=dict,
        doc="parts of it that differ (advantage, aggregation, kl, ...), and their knobs",
    )
    num_substeps: int = chz.field(default=1, doc="optimizer steps a batch, each on an equal part of its groups")
    reference_model: str | None = chz.field(
        default=None, doc="what a KL term is the distance from, or the teacher; None is the model as training finds it"
    )
    teachers: dict[str, str] = chz.field(
        default_factory=dict, doc="tag -> model that groups with this logging tag are scored under instead"
    )
    max_tokens: int = chz.field(doc="tokens a turn may sample")
    max_turns: int | None = chz.field(default=None, doc="turns of an episode")
    val_max_turns: int | None = chz.field(default=None, doc="turns of a held-out episode; None is max_turns")
    max_sampled_tokens: int | None = chz.field(default=None, doc="tokens an episode may sample")
    max_episode_tokens: int | None = chz.field(default=None, doc="tokens of an episode, observations included")
    max_tool_calls: int | None = chz.field(default=None, doc="tool calls of an episode; what is allowed still runs")
    episode_seconds: float | None = chz.field(default=None, doc="wall clock of an episode")
    sample_seconds: float | None = chz.field(default=None, doc="wall clock of one turn's sampling")
    grader_seconds: float | None = chz.field(default=None, doc="wall clock of one grading")
    rollout_strategy: Strategy = chz.field(
        default_factory=FailFast, doc="FailFast, RetryOnFailure or MinViableGroup: what a fault of an env leads to"
    )
    temperature: float = chz.field(default=1.0, doc="of training rollouts")
    eval_temperature: float | None = chz.field(default=None, doc="of held-out evaluation; None is as in training")
    overlong_masking: bool = chz.field(default=False, doc="do not train episodes that a budget cut short")
    frozen_policies: dict[str, str] = chz.field(
        default_factory=dict, doc="name -> finished run on the same base, whose last adapter opponents sample from"
    )
    shaping: Shaping = chz.field(default_factory=Shaping, doc="rewards of episodes that a budget cut short")
    stream_minibatch: StreamMinibatchConfig | None = chz.field(
        default=None, doc="take the gradient of groups as they finish; None waits for the whole batch"
    )
    off_policy: AsyncConfig | None = chz.field(default=None, doc="groups play on while a step trains; None is in turn")
    sampler_gap: SamplerGap | None = chz.field(
        default=None, doc="training samples with weights some steps old, or with noise, to study what that does"
    )
    max_sampling_attempts: int = chz.field(
        default=1, doc="replace groups of equal rewards, starting at most this many times a step's groups"
    )
    renderer_name: str | None = chz.field(
        default=None, doc="None recognises the tokenizer's own template; 'template' asks it"
    )
    thinking: Literal["keep", "strip", "compact"] | None = chz.field(
        default=None, doc="thoughts of earlier turns: kept, dropped as the template does, or all dropped now and then"
    )
    compact_turns: int | None = chz.field(
        default=None, doc="with thinking=compact: all thoughts are dropped after every so many turns"
    )
    enable_thinking: bool | None = chz.field(
        default=None, doc="False asks for turns without thoughts, in families that can be asked; None is on"
    )
    engine: EngineConfig = chz.field(default_factory=EngineConfig, doc="capacity and shapes of the sampler")
    packing: Packing | None = chz.field(default=None, doc="shapes of a training batch; None fits engine.context")
    mesh: MeshShape = chz.field(default_factory=MeshShape, doc="devices along each axis")
    remat: bool = chz.field(default=True, doc="compute activations again in the backward pass; False is faster")
    dtype: str | None = chz.field(
        default=None, doc="of the products: float32 or bfloat16; None is what suits the device"
    )
    seed: int = chz.field(default=0, doc="every random number of the run follows from it")
    eval_every: int = chz.field(default=20, doc="steps between held-out evaluations; 0 is first and last only")
    save_every: int = chz.field(default=20, doc="steps between checkpoints; 0 is the last only")
    num_groups_to_log: int = chz.field(default=4, doc="groups of a batch whose episodes are recorded")


def parse(arguments: Sequence[str], **defaults: Any) -> Config:
    """The configuration that `command` runs. Unknown keys are refused, with the nearest known one."""
    given = [argument.split("=", 1)[0] for argument in arguments]
    flat = {key: value for name, default in defaults.items() for key, value in _flat(name, default)}
    kept = {key: v for key, v in flat.items() if not any(key == g or key.startswith(f"{g}.") for g in given)}
    try:
        return chz.Blueprint(Config).apply(kept).make_from_argv(list(arguments))
    except ValueError as error:  # chz says in a note which argument it was; the command shows messages only
        raise ValueError(" ".join([str(error), *map(str.strip, getattr(error, "__notes__", ()))])) from error


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A default as the keys that chz can override one by one."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        yield name, value
        return
    yield name, type(value)
    for f in dataclasses.fields(value):
        yield from _flat(f"{name}.{f.name}", getattr(value, f.name))


def config_renderer(config: Config, tokenizer: Tokenizer) -> Renderer:
    """The renderer of a run."""
    return renderer_for(
        tokenizer,
        config.renderer_name,
        thinking=config.thinking,
        enable_thinking=config.enable_thinking,
        compact_turns=config.compact_turns,
    )


def describe(config: Any) -> Any:
    """A configuration as JSON-able values, each dataclass with its type's name where a base class was declared."""
    if chz.is_chz(config):
        return {f: describe(getattr(config, f)) for f in chz.chz_fields(config)}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = {f.name: describe(getattr(config, f.name)) for f in dataclasses.fields(config)}
        named = isinstance(config, (RLDatasetBuilder, Demonstrator, Strategy))
        return {"type": type(config).__qualname__, **fields} if named else fields
    if isinstance(config, Mapping):
        return {str(k): describe(v) for k, v in config.items()}
    if isinstance(config, (list, tuple)):
        return [describe(v) for v in config]
    if isinstance(config, float) and not math.isfinite(config):
        return str(config)
    return config if config is None or isinstance(config, (bool, int, float, str)) else _ADDRESS.sub("", repr(config))


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # differs from process to process, so a resumed run would look changed
