"""From named tensors to a parameter tree: checked before anything is read, then one tensor at a time.

A `Source` says what a file holds and reads one tensor; `assemble` does not know which format it comes from.
Checkpoints store matrices [out, in], our tree [in, out].
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxrl.models.config import ModelConfig
from jaxrl.models.spec import Params, ParamSpec, layer_specs, param_specs


@dataclass(frozen=True)
class Source:
    """Named tensors of one checkpoint: `shapes` as stored, known without reading; `read` brings one to the host."""

    where: str
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]


@dataclass(frozen=True)
class Names:
    """What a format calls our parameters: a row of its table each.

    top: whole names, those outside of layers. layer: what the names in layer number {} begin with. vectors: the rest of
    the name. projections: a module, whose matrix is its `weight` and whose `_bias` its `bias`.
    """

    top: Mapping[str, str]
    layer: str
    vectors: Mapping[str, str]
    projections: Mapping[str, str]

    def tree(self, config: ModelConfig) -> dict[str, Any]:
        """The tree of `spec.param_specs(config)` with the name of each tensor as leaf."""
        tops = self.top if not config.tie_embeddings else {k: v for k, v in self.top.items() if k != "lm_head"}
        ours = [(name, self._in_layer(name)) for name in layer_specs(config)]
        layers = tuple({name: self.layer.format(i) + theirs for name, theirs in ours} for i in range(config.layers))
        return {**tops, "layers": layers}

    def _in_layer(self, ours: str) -> str:
        if ours in self.vectors:
            return self.vectors[ours]
        if ours in self.projections:
            return f"{self.projections[ours]}.weight"
        return f"{self.projections[ours.removesuffix('_bias')]}.bias"


@dataclass(frozen=True)
class Leaf:
    """One parameter: where it goes in the tree, what it is called in the file, and what it should look like."""

    path: str
    name: str
    spec: ParamSpec

    @property
    def transposed(self) -> bool:
        """Whether the file has it [out, in]. The embedding is a table, [V, M] on both sides."""
        return len(self.spec.shape) == 2 and self.path != "embed"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.spec.shape[::-1] if self.transposed else self.spec.shape


def leaves(config: ModelConfig, names: Any) -> list[Leaf]:
    """The parameters of a model in tree order, with their names in a file (a tree like `param_specs`)."""
    specs, treedef = jax.tree.flatten_with_path(param_specs(config), is_leaf=lambda x: isinstance(x, ParamSpec))
    flat = treedef.flatten_up_to(names)
    return [
        Leaf(jax.tree_util.keystr(path, simple=True, separator="/"), name, spec)
        for (path, spec), name in zip(specs, flat, strict=True)
    ]


def check(wanted: list[Leaf], source: Source, *, optional: Iterable[str] = ()) -> None:
    """Refuse a file whose tensors are not exactly the wanted ones. `optional` names may be there besides."""
    shapes = {leaf.name: leaf.stored_shape for leaf in wanted}
    missing = [n for n in shapes if n not in source.shapes]
    surplus = [n for n in source.shapes if n not in shapes and n not in set(optional)]
    wrong = [
        f"{n} is {list(source.shapes[n])}, expected {list(shape)}"
        for n, shape in shapes.items()
        if n in source.shapes and source.shapes[n] != shape
    ]
    problems = [
        f"{count}: {_few(items)}"
        for count, items in (("missing tensors", missing), ("unexpected tensors", surplus), ("wrong shapes", wrong))
        if items
    ]
    if problems:
        hint = "the weights and the configuration are not of the same model"
        if missing == ["lm_head.weight"]:
            hint = "if the output matrix is the embedding, set tie_word_embeddings=true in config.json"
        raise ValueError(f"{source.where}: {'; '.join(problems)}. Hint: {hint}")


def _few(items: list[str]) -> str:
    more = f" and {len(items) - 5} more" if len(items) > 5 else ""
    return ", ".join(items[:5]) + more


def assemble(config: ModelConfig, names: Any, source: Source, *, dtype: Any, shardings: Any = None) -> Params:
    """Parameters of `config` in `dtype`, read and placed one tensor at a time. Call `check` first.

    shardings: a tree like the parameters of `jax.sharding.Sharding`s, or None for the default device. On the host
    there are never more than three copies of one tensor besides what the devices hold.
    """
    wanted = leaves(config, names)
    treedef = jax.tree.structure(param_specs(config), is_leaf=lambda x: isinstance(x, ParamSpec))
    places = [None] * len(wanted) if shardings is None else treedef.flatten_up_to(shardings)
    values = [_place(_converted(leaf, source, dtype), place) for leaf, place in zip(wanted, places, strict=True)]
    return jax.tree.unflatten(treedef, values)


def _converted(leaf: Leaf, source: Source, dtype: Any) -> np.ndarray:
    array = source.read(leaf.name)
    return (array.T if leaf.transposed else array).astype(dtype, order="C")


def _place(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """On its device or devices. Each process hands over only the pieces its own devices hold."""
    if sharding is None:
        return jax.device_put(array).block_until_ready()
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index]).block_until_ready()
