"""The groups of a run under way: started as admission allows, handed over finished, counted until they are trained.

    Supply -> fill() starts groups, each a task of the loop's nursery -> take() gives the next one to train
           -> trained() says that a step is over, which makes room for more

Knows group builders, versions and admission; knows no loss and no device. The order of the data is a stream of
numbered groups: number n is always the same builder with the same random numbers, whenever it plays.
"""

import bisect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import trio

from jaxrl.env import EnvGroupBuilder, RLDataset
from jaxrl.runtime.admission import Admission
from jaxrl.runtime.record import group_from_json, group_to_json
from jaxrl.types import TrajectoryGroup


@dataclass(frozen=True)
class Place:
    """Where a group stands in the stream: its number, and its batch and index there."""

    number: int
    batch: int
    index: int


@dataclass(frozen=True)
class Played:
    """A finished group: which one, what it started with, and what came of it."""

    place: Place
    version: int
    group: TrajectoryGroup


class Stream:
    """The data as one endless row of groups; when the dataset ends it starts again, with other random numbers.

    A batch is asked for when the stream first reaches it, and its size is remembered.
    """

    def __init__(self, dataset: RLDataset) -> None:
        self._dataset = dataset
        self._batch: tuple[int, Sequence[EnvGroupBuilder]] = (-1, ())  # the last one asked for
        self._ends: list[int] = []  # of the first epoch: groups up to the end of each batch

    def place(self, number: int) -> Place:
        """Where group `number` lies. Batches are numbered on through the epochs."""
        while len(self._ends) < len(self._dataset) and number >= self._groups:
            self._ends.append(self._groups + len(self._get(len(self._ends))))
        epoch, rest = divmod(number, self._groups) if number >= self._groups else (0, number)
        batch = bisect.bisect_right(self._ends, rest)
        return Place(number, epoch * len(self._dataset) + batch, rest - (self._ends[batch - 1] if batch else 0))

    def builder(self, place: Place) -> EnvGroupBuilder:
        """The builder of that group."""
        return self._get(place.batch)[place.index]

    def size(self, batch: int) -> int:
        """Groups of a batch; the last of an epoch may be smaller."""
        return len(self._get(batch))

    def _get(self, batch: int) -> Sequence[EnvGroupBuilder]:
        if self._batch[0] != batch:
            self._batch = batch, self._dataset.get_batch(batch % len(self._dataset))
        return self._batch[1]

    @property
    def _groups(self) -> int:
        return self._ends[-1] if self._ends else 0


Play = Callable[[EnvGroupBuilder, Place], Awaitable[TrajectoryGroup]]
"""Play one group to its end."""


class Supply:
    """Owns which groups are under way. Its tasks live in the nursery it is given and end with it."""

    def __init__(
        self,
        stream: Stream,
        play: Play,
        nursery: trio.Nursery,
        *,
        version: Callable[[], int],
        teaches: Callable[[TrajectoryGroup], bool],
        max_attempts: int = 1,
    ) -> None:
        """version: of the weights that sample now. teaches, max_attempts: a group that does not teach is replaced
        by the next of the stream, as long as a step starts at most max_attempts times its groups.
        """
        self._stream, self._play, self._nursery = stream, play, nursery
        self._version, self._teaches, self._max_attempts = version, teaches, max_attempts
        self._next = 0
        self._again: list[int] = []  # numbers that were started before a resume, and not finished
        self._playing: dict[int, int] = {}  # number -> version
        self._finished: list[Played] = []
        self._chosen: list[Played] = []
        self._admission, self._needed = Admission(0), 0
        self._changed = trio.Event()
        self._replaced = 0
        self._dropped: list[Played] = []

    def fill(self, admission: Admission, needed: int) -> None:
        """Start as many groups as may start under `admission`; both hold from now on.

        needed: groups the run still trains, beyond which nothing is started.
        """
        self._admission, self._needed = admission, needed
        while admission.may_start(self.untrained) and self.untrained < needed:
            number = self._again.pop(0) if self._again else self._next
            self._next = max(self._next, number + 1)
            self._playing[number] = self._version()
            self._nursery.start_soon(self._run, self._stream.place(number))

    async def take(self, step: int) -> Played:
        """The next group to train in `step`; waits for one."""
        while True:
            versions = [p.version for p in self._finished]
            index = self._admission.pick(versions, list(self._playing.values()), len(self._chosen), step)
            if index is not None:
                self._chosen.append(self._finished.pop(index))
                return self._chosen[-1]
            if not self._playing:
                raise RuntimeError(
                    f"a group started with version {min(versions, default=None)}, and step {step} trains no token "
                    f"older than {self._admission.steps_ahead} steps: resume with the bound it was started under"
                )
            self._changed = trio.Event()
            await self._changed.wait()

    def trained(self) -> None:
        """The groups taken so far are trained; a new step begins."""
        self._chosen, self._replaced = [], 0

    def replaced(self) -> list[Played]:
        """The groups that others have replaced since this was last asked."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def size(self, step: int) -> int:
        """Groups of the dataset's batch for `step`."""
        return self._stream.size(step)

    def builder(self, place: Place) -> EnvGroupBuilder:
        """A builder of the group at `place`, to ask what it is about."""
        return self._stream.builder(place)

    @property
    def untrained(self) -> int:
        """Groups started and not yet trained."""
        return len(self._playing) + len(self._finished) + len(self._chosen)

    async def _run(self, place: Place) -> None:
        group = await self._play(self._stream.builder(place), place)
        played = Played(place, self._playing.pop(place.number), group)
        spare = self._replaced < (self._max_attempts - 1) * self._admission.groups
        if spare and not self._teaches(group):
            self._replaced += 1
            self._dropped.append(played)
            self.fill(self._admission, self._needed)
        else:
            self._finished.append(played)
        self._changed.set()

    # --- resuming --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, between two steps: the place in the data, and what is finished but not trained."""
        return {
            "next": self._next,
            "unfinished": sorted([*self._playing, *self._again]),
            "finished": [
                {"number": p.place.number, "version": p.version, "group": group_to_json(p.group)}
                for p in self._finished
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint: finished groups are there again, unfinished ones start again."""
        self._next, self._again = state["next"], list(state["unfinished"])
        self._finished = [
            Played(self._stream.place(f["number"]), f["version"], group_from_json(f["group"]))
            for f in state["finished"]
        ]
