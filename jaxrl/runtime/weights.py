"""What samples: weights, policies that sessions are pinned to, copies that outlive an update.

Knows trees of arrays and version numbers. Knows nothing of sessions, nor of when anything is published.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models.spec import Params

FROZEN = -1
"""The version of named policies, which are never trained on: what a datum also says of tokens that nobody drew."""


class Weights(NamedTuple):
    """What samples: base parameters and an adapter (None: none)."""

    params: Params
    adapter: Any = None

    @property
    def trained(self) -> Any:
        """The arrays an update replaces: the adapter, or without one everything."""
        return self.params if self.adapter is None else self.adapter


@dataclass(frozen=True, eq=False)
class Policy:
    """Weights as sessions see them, with the version their tokens are recorded under. Equal only to itself."""

    weights: Weights
    version: int
    name: str | None = None  # of a frozen adapter; None for what was published
    key: object = field(default_factory=object, repr=False)  # stands for the policy where its weights must not stay

    def __str__(self) -> str:
        return self.name or f"version {self.version}"

    def arrays(self) -> Weights:
        """The weights. RuntimeError when an update has taken them away."""
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(self.weights.trained)):
            raise RuntimeError(
                f"the weights of policy {self} are gone: an update donates the arrays it trains. To sample during or "
                "after an update, open the engine with snapshot(weights), publish with copy=True, and register "
                "adapters that are copies"
            )
        return self.weights


def snapshot(weights: Weights) -> Weights:
    """Weights that survive the next update, which donates the arrays it trains. Call it where the device is called.

    Copies on the device, shardings kept: the adapter under LoRA (the base is shared), or the whole model without one.
    """
    copied = jax.tree.map(lambda x: jnp.array(x, copy=True), weights.trained)
    return Weights(copied) if weights.adapter is None else Weights(weights.params, copied)


def check_alike(got: Weights, live: Weights, what: str) -> None:
    """Raise ValueError unless `got` can run the programs of `live`: the same names, shapes and dtypes."""
    if got.params is not live.params:
        _check_tree(got.params, live.params, what, "params")
    _check_tree(got.adapter, live.adapter, what, "adapter")


def place_alike(adapter: Any, live: Weights, what: str) -> Any:
    """`adapter` where and how the live one lies, so that it runs the same programs; not copied when it lies there."""
    if live.adapter is None:
        raise ValueError(
            f"{what}: the engine samples whole weights, without an adapter that another could stand in for; give "
            "session(policy=Policy(weights, version)) instead"
        )
    _check_tree(adapter, live.adapter, what, "adapter")
    return jax.tree.map(_placed, adapter, live.adapter)


def _placed(x: Any, like: Any) -> jax.Array:
    if isinstance(x, jax.Array) and (x.sharding, x.committed) == (like.sharding, like.committed):
        return x
    # An array that is committed to a device, where the live one is not, would be a program of its own.
    return jax.device_put(x, like.sharding) if like.committed else jnp.array(np.asarray(x))


def _check_tree(got: Any, live: Any, what: str, part: str) -> None:
    have, want = _outline(got), _outline(live)
    if have == want:
        return
    name = next(n for n in (*want, *have) if have.get(n) != want.get(n))
    raise ValueError(
        f"{what}: {_named(part, name)} is {have.get(name, 'missing')}, but the live weights have "
        f"{want.get(name, 'no such array')}; policies of one engine share its base and its programs, so they must have "
        "the same names, shapes and dtypes"
    )


def _named(part: str, name: str) -> str:
    return f"{part}.{name}" if name else part


def _outline(tree: Any) -> dict[str, str]:
    def outline(x: Any) -> str:
        return f"{x.dtype}{list(x.shape)}"

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    keystr: Callable[..., str] = jax.tree_util.keystr
    return {keystr(path, simple=True, separator="."): outline(x) for path, x in leaves}
