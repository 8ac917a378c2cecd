"""Which group may start and which is trained next: the bound on age holds, nothing waits for ever."""

from hypothesis import given
from hypothesis import strategies as st

from jaxrl.runtime.admission import Admission


def test_in_turn_a_batch_starts_and_any_finished_group_of_it_is_next() -> None:
    admission = Admission(groups=3)
    assert [admission.may_start(n) for n in range(5)] == [True, True, True, False, False]
    assert admission.pick([7], [7, 7], chosen=0, step=7) == 0
    assert admission.pick([], [7, 7], chosen=0, step=7) is None


def test_ahead_the_oldest_weights_come_first() -> None:
    admission = Admission(groups=2, steps_ahead=1)
    assert [admission.may_start(n) for n in range(6)] == [True] * 4 + [False] * 2
    assert admission.pick([1, 0, 1], [0], chosen=0, step=1) == 1


def test_a_straggler_is_overtaken_only_while_it_can_still_be_trained_in_time() -> None:
    admission = Admission(groups=2, steps_ahead=1)
    # Version 0 has to be trained by step 1. At step 0 three others may go first; at step 1 one other, not two.
    assert admission.pick([0, 0], [0, 0], chosen=0, step=0) == 0
    assert admission.pick([1], [0, 1], chosen=0, step=1) == 0
    assert admission.pick([1], [0], chosen=1, step=1) is None
    assert admission.pick([1], [0, 0], chosen=0, step=1) is None


@given(st.integers(1, 4), st.integers(0, 3), st.data())
def test_I8_whoever_finishes_when_no_group_is_trained_too_late_and_no_step_is_short(
    groups: int, ahead: int, data: st.DataObject
) -> None:
    admission = Admission(groups, ahead)
    playing: list[int] = []
    finished: list[int] = []
    for step in range(8):
        while admission.may_start(len(playing) + len(finished)):
            playing.append(step)
        for chosen in range(groups):
            while (index := admission.pick(finished, playing, chosen, step)) is None:
                assert playing, "whoever waits, waits for something"
                finished.append(playing.pop(data.draw(st.integers(0, len(playing) - 1))))
            assert step - finished.pop(index) <= ahead
            for _ in range(data.draw(st.integers(0, len(playing)))):
                finished.append(playing.pop())
