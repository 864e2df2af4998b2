"""Who tries again waits longer and longer, as long as the server asks, and not long after what is a new failure."""

import itertools

from trimtab_kubernetes import Unreachable
from trimtab_kubernetes.backoff import Backoff
from trimtab_pipelines.backoff import backoff

AWAY = Unreachable("away")


def test_pauses_double_up_to_the_longest():
    assert list(itertools.islice(backoff(0.5, 3.0), 5)) == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_they_differ_and_begin_anew_once_it_has_worked():
    pauses = Backoff(0.2, 10.0)

    first, *_, last = [pauses.next_seconds(AWAY) for _ in range(10)]
    pauses.reset()

    assert 0.1 <= first <= 0.2
    assert 5.0 <= last <= 10.0
    assert 0.1 <= pauses.next_seconds(AWAY) <= 0.2
    assert len({Backoff(1.0, 1.0).next_seconds(AWAY) for _ in range(10)}) > 1


def test_a_server_is_left_alone_for_as_long_as_it_asks():
    assert Backoff(0.2, 10.0).next_seconds(Unreachable("busy", 429, retry_after_seconds=30.0)) == 30.0
    assert Backoff(60.0, 60.0).next_seconds(Unreachable("busy", 429, retry_after_seconds=1.0)) >= 30.0
