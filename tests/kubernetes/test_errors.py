"""`Backoff`: delays that grow, honour the server's Retry-After and start anew after a success."""

import itertools

from trimtab_kubernetes import Unreachable
from trimtab_kubernetes.errors import Backoff
from trimtab_pipelines.backoff import backoff

AWAY = Unreachable("away")


def test_backoff_doubles_up_to_its_maximum():
    assert list(itertools.islice(backoff(0.5, 3.0), 5)) == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_backoff_has_jitter_and_resets():
    pauses = Backoff(0.2, 10.0)

    first, *_, last = [pauses.next_seconds(AWAY) for _ in range(10)]
    pauses.reset()

    assert 0.1 <= first <= 0.2
    assert 5.0 <= last <= 10.0
    assert 0.1 <= pauses.next_seconds(AWAY) <= 0.2
    assert len({Backoff(1.0, 1.0).next_seconds(AWAY) for _ in range(10)}) > 1


def test_retry_after_is_respected():
    assert Backoff(0.2, 10.0).next_seconds(Unreachable("busy", 429, retry_after_seconds=30.0)) == 30.0
    assert Backoff(60.0, 60.0).next_seconds(Unreachable("busy", 429, retry_after_seconds=1.0)) >= 30.0
