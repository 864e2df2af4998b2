"""Machine speed over time: work ends once the speeds add up to it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_adapter.simulation.environment import MachineSpeed

PAUSING = MachineSpeed((10.0, 11.0, 13.0), (2.0, 0.0, 0.5))


@pytest.mark.parametrize(
    ("begin", "work", "end"),
    [
        (10.0, 1.0, 10.5),  # twice as fast
        (10.5, 1.0, 11.0),  # done as the pause begins
        (10.5, 2.0, 15.0),  # one before the pause, one at half the speed after it
        (12.0, 1.0, 15.0),  # begun in the pause
        (20.0, 1.0, 22.0),  # after the last moment
        (4.0, 2.0, 5.0),  # before the first
        (12.0, 0.0, 12.0),  # nothing to do
    ],
)
def test_work_ends_when_the_speeds_have_added_up_to_it(begin, work, end):
    assert PAUSING.finish(begin, work) == pytest.approx(end)


def test_a_pause_before_the_first_moment_lasts_until_the_second():
    assert MachineSpeed((0.0, 1.0), (0.0, 1.0)).finish(-5.0, 0.25) == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("since", "speeds"),
    [((), ()), ((0.0,), (1.0, 2.0)), ((0.0, 0.0), (1.0, 1.0)), ((0.0, 1.0), (-1.0, 1.0)), ((0.0, 1.0), (1.0, 0.0))],
)
def test_a_speed_that_cannot_be_is_refused(since, speeds):
    with pytest.raises(ValueError, match="a processor's speed needs"):
        MachineSpeed(since, speeds)


SPEEDS = st.lists(st.sampled_from((0.0, 0.5, 1.0, 2.0)), min_size=1, max_size=8)


@given(SPEEDS, st.floats(-2, 12), st.floats(0, 10), st.floats(0, 10))
def test_work_done_in_two_parts_ends_as_if_done_in_one(speeds, begin, first, second):
    speed = MachineSpeed(tuple(range(len(speeds) + 1)), (*speeds, 1.0))

    halfway = speed.finish(begin, first)
    assert begin <= halfway <= speed.finish(begin, first + second) + 1e-9
    assert speed.finish(halfway, second) == pytest.approx(speed.finish(begin, first + second), abs=1e-6)
    grid = np.arange(begin, speed.finish(begin, first), 0.001)
    at = np.clip(np.floor(grid).astype(int), 0, len(speeds))
    assert np.array([*speeds, 1.0])[at].sum() * 0.001 == pytest.approx(first, abs=0.01)
