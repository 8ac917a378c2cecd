"""How many judgements may be under way at once, in the whole process and not only in one group.

Knows trio; must not know what is judged.
"""

from dataclasses import dataclass

import trio


@dataclass(frozen=True)
class Limit:
    """At most `at_once` at a time. Equal limits share their places, wherever they came from, also by pickle."""

    name: str
    at_once: int

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise ValueError(f"at_once={self.at_once}: expected at least 1")

    def places(self) -> trio.CapacityLimiter:
        """The limiter of this trio run; `async with limit.places():` takes one."""
        try:
            known = _limiters.get()
        except LookupError:
            known = {}
            _limiters.set(known)
        return known.setdefault(self, trio.CapacityLimiter(self.at_once))


_limiters: trio.lowlevel.RunVar[dict[Limit, trio.CapacityLimiter]] = trio.lowlevel.RunVar("limits of judges")
