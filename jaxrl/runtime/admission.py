"""When a group may start and which finished one is trained next, so that no token gets too old. Pure numbers.

With S = `steps_ahead` and B groups a step, at most B (S + 1) groups are started and not yet trained. Training them
in the order of the weights they started with then meets the bound by itself: when version v is published, all groups
that started with it or earlier number at most B (S + 1), which is what the steps v to v + S train. A finished group
may overtake one that still plays only while the older ones still fit into the steps they have left; so nothing is
thrown away for its age, and a step waits for a straggler only when the next one would be too late.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Admission:
    """B groups a step, and how many steps the weights that train may be ahead of those that sampled."""

    groups: int
    steps_ahead: int = 0

    def may_start(self, untrained: int) -> bool:
        """Whether one more group may start beside those that are started and not yet trained."""
        return untrained < self.groups * (self.steps_ahead + 1)

    def pick(self, finished: Sequence[int], playing: Sequence[int], chosen: int, step: int) -> int | None:
        """Index into `finished` of the next group to train, or None to wait for one that plays.

        finished, playing: version each group started with. chosen: groups picked for this step already.
        """
        order = sorted(range(len(finished)), key=lambda i: finished[i])
        for index in order:
            left = [*(v for i, v in enumerate(finished) if i != index), *playing]
            if self._fits(left, self.groups - chosen - 1, step):
                return index
        return None

    def _fits(self, left: Sequence[int], room: int, step: int) -> bool:
        """Whether every group that is left can be trained in time, `room` of them in this step."""
        due = sorted(left)
        return all(count <= room + self.groups * (v + self.steps_ahead - step) for count, v in enumerate(due, start=1))
