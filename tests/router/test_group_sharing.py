"""Two replica groups at one queue: rows that overflow, and second passes in another group."""

from types import SimpleNamespace

import pytest

from tests.router.test_hosted_variants import LOOK, SMALL, Hosting
from tests.router.test_looking_again import DOUBTED, SURE
from trimtab_router.scheduling.group_sharing import Overflow, Server, overflow

LARGE = frozenset({"large"})


def rows_due(*deadlines):
    return [SimpleNamespace(rows=1, request=SimpleNamespace(due_at=deadline)) for deadline in deadlines]


@pytest.mark.parametrize(
    ("deadlines", "found"),
    [
        ((3.0, 3.0), Overflow(0, 2.0)),
        ((1.5, 3.0), Overflow(1, 2.0)),
        ((2.5, 2.5, 2.5, 2.5), Overflow(2, 1.5)),
        ((3.0, 3.0, 4.0, 4.0), Overflow(0, 2.0)),
        ((1.0, 1.0, 1.0, 1.0, 1.0), Overflow(4)),
    ],
)
def test_rows_overflow_that_others_serve_too_late(deadlines, found):
    """A replica that is free at 1 s serves two rows a second."""
    servers = [Server(free_at=1.0, seconds=1.0, batch_rows=2)]

    assert overflow(rows_due(*deadlines), servers, 0.0, lambda _: True, 4) == found


class SplitCascade(Hosting):
    """A small replica, and a large one for its low-confidence rows."""

    def __init__(self):
        groups = [{"variant": "large", "replicas": 1}]
        super().__init__(ready=(SMALL, LARGE), plannedEscalation=LOOK, otherGroups=groups)


def test_low_confidence_rows_run_again_in_the_second_group():
    top = SplitCascade()
    work, waiting = top.ask(rows=2), top.ask(rows=8)

    assert top.keys == [("small", "default")], "the second group serves no new rows"
    top.answer(top.sent[0], [SURE, DOUBTED])
    assert [(batch.replica.name, batch.key, batch.rows) for batch in top.sent[1:]] == [
        ("slot-0", ("small", "default"), 8),
        ("slot-1", ("large", "default"), 1),
    ]
    top.answer(top.sent[2], [SURE])
    assert [part.variant for part in work.owner.served] == ["small", "large"]
    assert waiting.owner.served is None or not waiting.owner.served


def test_no_row_is_escalated_without_the_second_group():
    top = SplitCascade()
    top.slots[1].set_ready_variants(frozenset())
    top.scheduler.refresh_replicas()
    work = top.ask(rows=2)
    top.answer(top.sent[0], [SURE, DOUBTED])

    assert top.sent[0].escalation is None
    assert [part.variant for part in work.owner.served] == ["small"]


def test_second_group_serves_new_rows_while_the_first_is_ejected():
    top = SplitCascade()
    top.slots[0].set_ejection("it is slow")
    top.ask()

    assert [(batch.replica.name, batch.key) for batch in top.sent] == [("slot-1", ("large", "default"))]
