"""What a group does about an attempt that failed for reasons of its own (a fault, not a bad episode).

Three published policies as rows of numbers; the group (`rollout.py`) reads them and is the only place that catches.
Knows no env and no engine.
"""

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class FailFast:
    """The first fault ends the run: siblings are cancelled, and the user sees that error."""

    tolerant: ClassVar[bool] = False
    max_retries: ClassVar[int] = 0

    def least(self, members: int) -> int:
        """Members that must end well for the group to be trained: none, as only a timeout gets this far."""
        return 0


@dataclass(frozen=True)
class RetryOnFailure:
    """A failed attempt is made again in a fresh env, `max_retries` times a group; then the group is given up."""

    max_retries: int = 3
    tolerant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_retries(self.max_retries)

    def least(self, members: int) -> int:
        """All of them."""
        return members


@dataclass(frozen=True)
class MinViableGroup:
    """Retries like `RetryOnFailure`, then goes on with what is left, if that is at least `min_successful` members.

    min_successful: None is three quarters of the group, rounded up.
    """

    min_successful: int | None = None
    max_retries: int = 3
    tolerant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_retries(self.max_retries)
        if self.min_successful is not None and self.min_successful < 1:
            raise ValueError(f"min_successful={self.min_successful}: expected at least 1, or None for three quarters")

    def least(self, members: int) -> int:
        """`min_successful`, but never more than there are."""
        return min(members, math.ceil(0.75 * members) if self.min_successful is None else self.min_successful)


Strategy = FailFast | RetryOnFailure | MinViableGroup


def _check_retries(retries: int) -> None:
    if retries < 0:
        raise ValueError(f"max_retries={retries}: expected 0 or more")
