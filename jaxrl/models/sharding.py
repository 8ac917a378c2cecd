"""Where arrays live on a mesh: one table from logical axes to mesh axes.

Knows logical axis names (`spec.py` gives one to each dimension of each parameter) and device meshes. Knows nothing
about models, steps or which process it runs in. A parameter never mentions a mesh axis; to shard differently, give
`shardings` another table.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

Rules = Mapping[str, tuple[str, ...]]

RULES: Rules = {
    "batch": ("data", "fsdp"),
    "layers": (),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, *, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of data x fsdp x tensor devices: the first that many of `devices` (default: all)."""
    shape = (data, fsdp, tensor)
    available = list(jax.devices() if devices is None else devices)
    needed = math.prod(shape)
    if min(shape) < 1 or needed > len(available):
        raise ValueError(
            f"a mesh of data={data}, fsdp={fsdp}, tensor={tensor} needs {needed} devices and axes of at least 1, "
            f"but there are {len(available)}"
        )
    grid = np.array(available[:needed]).reshape(shape)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def spec(axes: Sequence[str | None], rules: Rules = RULES, *, name: str = "array") -> PartitionSpec:
    """Partition of one array from the logical axes of its dimensions. `name` is for the error message."""
    parts: list[tuple[str, ...] | None] = []
    owner: dict[str, str] = {}
    for axis in axes:
        mesh_axes = () if axis is None else _rule(axis, rules, name)
        for mesh_axis in mesh_axes:
            if mesh_axis in owner:
                raise ValueError(
                    f"{name}: its axes {owner[mesh_axis]!r} and {axis!r} both map to mesh axis {mesh_axis!r}, which "
                    "can split one dimension only; change a rule, or give one of the dimensions the axis None"
                )
            owner[mesh_axis] = str(axis)
        parts.append(mesh_axes or None)
    return PartitionSpec(*parts)


def _rule(axis: str, rules: Rules, name: str) -> tuple[str, ...]:
    if axis not in rules:
        close = difflib.get_close_matches(axis, rules) or sorted(rules)
        raise ValueError(f"{name}: no sharding rule for axis {axis!r}; the nearest names are {', '.join(close)}")
    return rules[axis]


def _is_axes(x: object) -> bool:
    return isinstance(x, tuple) and all(a is None or isinstance(a, str) for a in x)


def shardings(mesh: Mesh, logical_axes: Any, shapes: Any, rules: Rules = RULES) -> Any:
    """The tree of `NamedSharding`s of a tree of logical axes. `shapes`: the same tree of anything with a `.shape`."""

    def one(path: Any, axes: tuple[str | None, ...], array: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        partition = spec(axes, rules, name=name)
        for size, axis in zip(array.shape, axes, strict=True):
            mesh_axes = () if axis is None else rules[axis]
            parts = math.prod(mesh.shape[a] for a in mesh_axes)
            if size % parts:
                raise ValueError(
                    f"{name}: axis {axis!r} has {size} entries, which mesh axes {', '.join(mesh_axes)} cannot split "
                    f"into {parts} equal parts"
                )
        return NamedSharding(mesh, partition)

    return jax.tree_util.tree_map_with_path(one, logical_axes, shapes, is_leaf=_is_axes)


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())
