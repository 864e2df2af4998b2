"""The queue hands out the most urgent rows first, never more than it holds, each exactly once."""

from typing import Any
from weakref import WeakSet

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trimtab_protocol.chat.engine_routes import ForwardedRequest
from trimtab_router.refusal import Refusal
from trimtab_router.request import NO_OPTIONS, RequestOptions
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.stage_request import RowSlice, ServedRows, StageRequest


class Caller:
    """Owner of a stage request that records its results."""

    trace_parent = ""
    request_id = ""
    has_listener = False
    forwarded: ForwardedRequest | None = None
    has_client = True

    def __init__(self) -> None:
        self.heard: list[tuple[int, Any]] = []
        self.outputs = None
        self.served = ()
        self.refusal: Refusal | None = None
        self.starved: list[bool] = []
        self.advanced: list[tuple[int, Any]] = []

    def on_chunk(self, work, row, piece, now):  # noqa: ARG002 - the protocol of an owner
        self.heard.append((row, piece))

    def on_rows_completed(self, work, start, outputs):  # noqa: ARG002 - the protocol of an owner
        self.advanced.append((start, outputs))

    def on_completed(self, work, outputs, served):  # noqa: ARG002 - the protocol of an owner
        self.outputs = outputs
        self.served = served

    def on_refused(self, refusal):
        self.refusal = refusal

    def on_embeddings_lost(self, work, *, counts):  # noqa: ARG002 - the protocol of an owner
        self.starved.append(counts)


def a_work(rows=1, deadline=1.0, width=1, now=0.0, *, floor=0.0, inputs=("x",), **options):
    """A stage request; `floor` is the accuracy floor of the request and of the stage."""
    values = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    given = RequestOptions(accuracy_floor=floor, **options) if floor or options else NO_OPTIONS
    arrays = dict.fromkeys(inputs, values)
    return StageRequest(Caller(), "s", rows, arrays, deadline=deadline, now=now, options=given, accuracy_floor=floor)


def whole(work, **changes):
    return RowSlice(work, 0, work.rows, **changes)


def a_queue(*works, max_rows=1000):
    queue = DeadlineQueue(max_rows)
    for work in works:
        queue.push(whole(work))
    return queue


def take(queue, rows, reads=None):
    head = queue.head()
    batch = queue.batch_candidates(head, reads).first(rows) if head else []
    queue.remove(batch)
    return batch


def test_earliest_deadline_first_with_ties_by_arrival():
    late, soon, also_soon = a_work(deadline=3.0), a_work(deadline=1.0), a_work(deadline=1.0)
    queue = a_queue(late, soon, also_soon)

    assert [piece.request for piece in take(queue, 3)] == [soon, also_soon, late]
    assert queue.rows == 0
    assert queue.head() is None


def test_split_slice_keeps_its_remaining_rows_in_front():
    queue = a_queue(a_work(rows=5, deadline=1.0), a_work(rows=5, deadline=2.0))

    assert [(piece.start, piece.stop) for piece in take(queue, 7)] == [(0, 5), (0, 2)]
    assert [(piece.start, piece.stop) for piece in take(queue, 7)] == [(2, 5)]


def test_splitting_a_slice_splits_its_provisional_response():
    queue, work = DeadlineQueue(100), a_work(rows=4)
    profile = np.array([0.1, 0.2, 0.3, 0.4])
    known = ServedRows("small", "quick", 4, 0.0, 0.1, rows=4, accuracy=0.5, dispatched_at=0.0, confidences=profile)
    queue.push(RowSlice(work, 0, 4, provisional_response=known))
    head = queue.head()
    assert head is not None
    taken = head.first(3)
    queue.remove([taken])
    left = queue.pop()

    for piece, confidences in ((taken, [0.1, 0.2, 0.3]), (left, [0.4])):
        assert piece.provisional_response is not None
        assert piece.provisional_response.rows == len(confidences)
        assert piece.provisional_response.confidences is not None
        assert piece.provisional_response.confidences.tolist() == confidences


def test_room_is_counted_in_rows():
    queue = a_queue(a_work(rows=6), max_rows=8)

    assert queue.max_rows - queue.rows == 2


def test_postponed_request_goes_behind_earlier_deadlines():
    one, other, last = a_work(2, deadline=1.0), a_work(deadline=2.0), a_work(deadline=4.0)
    queue = a_queue(one, other, last)
    (first,) = take(queue, 1)
    queue.postpone(one, 3.0)
    queue.push(first)

    assert (queue.rows, one.queued_rows) == (4, 2)
    assert [piece.request for piece in take(queue, 4)] == [other, one, one, last]
    assert (queue.rows, one.queued_rows) == (0, 0)
    queue.postpone(one, 5.0)
    queue.push(first)
    assert queue.head() is first


def test_discarded_request_frees_rows_and_tensors_at_once():
    left, stays = a_work(rows=4), a_work(rows=2, deadline=2.0)
    queue = a_queue(left, stays)

    queue.discard(left)

    assert (queue.rows, left.inputs) == (2, {})
    assert [piece.request for piece in take(queue, 10)] == [stays]


def test_disconnected_clients_do_not_grow_the_queue():
    queue = a_queue(a_work(deadline=0.5))
    callers: WeakSet[Any] = WeakSet()
    for _ in range(1000):
        work = a_work(deadline=9.0)
        callers.add(work.owner)
        queue.push(whole(work))
        queue.discard(work)

    assert queue.rows == 1
    assert len(callers) < 200


def test_rows_of_different_shapes_never_share_a_batch():
    narrow, wide, later = a_work(deadline=2.0), a_work(deadline=1.0, width=3), a_work(deadline=3.0)
    queue = a_queue(narrow, wide, later)

    assert [piece.request for piece in take(queue, 8)] == [wide]
    assert [piece.request for piece in take(queue, 8)] == [narrow, later]


def test_rows_that_differ_in_unread_inputs_share_a_batch():
    narrow, wide, later = a_work(deadline=2.0), a_work(deadline=1.0, width=3), a_work(deadline=3.0)
    for work in (narrow, wide, later):
        work.signature = (*work.signature, ("text", (7,)))
    queue = a_queue(narrow, wide, later)

    assert queue.batch_candidates(queue.head(), frozenset({"text"})).rows == 3
    assert [piece.request for piece in take(queue, 2, frozenset({"text"}))] == [wide, narrow]
    assert [piece.request for piece in take(queue, 8)] == [later]
    assert queue.rows == 0


def test_removing_slices_keeps_the_position_of_others():
    works = [a_work(rows=4, deadline=1.0 + (n > 2)) for n in range(5)]
    queue = a_queue(*works)
    queue.remove([whole(works[1]), whole(works[3]).first(1)])

    left = [(works.index(piece.request), piece.start) for piece in queue]
    assert left == [(0, 0), (2, 0), (3, 1), (4, 0)]
    assert queue.rows == 15


def test_slice_that_runs_alone_shares_no_batch():
    first, suspect, last = a_work(deadline=1.0), a_work(deadline=2.0), a_work(deadline=3.0)
    queue = a_queue(first, last)
    queue.push(whole(suspect, alone=True))

    assert [[piece.request for piece in take(queue, 8)] for _ in range(3)] == [[first], [suspect], [last]]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20), st.integers(1, 2), st.booleans()), max_size=30),
    st.lists(st.integers(1, 8), min_size=1, max_size=10),
)
def test_every_row_leaves_once_in_order_of_deadline(works, sizes):
    made = [a_work(rows, deadline, width) for rows, deadline, width, _ in works]
    queue = a_queue(*made)
    for work, (*_, leaves) in zip(made, works, strict=True):
        if leaves:
            queue.discard(work)
    taken: list[RowSlice] = []
    turn = 0
    while queue.head() is not None:
        size = sizes[turn % len(sizes)]
        batch = take(queue, size)
        turn += 1
        assert 0 < sum(piece.rows for piece in batch) <= size
        assert len({piece.request.signature for piece in batch}) == 1
        assert [piece.request.deadline for piece in batch] == sorted(piece.request.deadline for piece in batch)
        taken += batch

    for work, (rows, *_, leaves) in zip(made, works, strict=True):
        edges = [(piece.start, piece.stop) for piece in taken if piece.request is work]
        covered = [row for start, stop in edges for row in range(start, stop)]
        assert covered == ([] if leaves else list(range(rows)))
    assert queue.rows == 0


@given(st.integers(1, 12), st.permutations(range(4)))
def test_results_are_joined_in_row_order(rows, order):
    work = a_work(rows)
    x = work.inputs["x"]
    edges = np.linspace(0, rows, 5).astype(int)
    pieces = [(edges[n], edges[n + 1]) for n in order if edges[n] < edges[n + 1]]
    for start, stop in pieces:
        assert work.owner.outputs is None
        work.add_result(
            start, stop - start, {"y": x[start:stop] + 1}, ServedRows("v", "default", 1, 0.0, 0.0, 1, 1.0, 0.0)
        )

    np.testing.assert_array_equal(work.owner.outputs["y"], x + 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 2)), max_size=40), st.integers(-1, 10))
def test_rows_before_counts_rows_due_by_then(works, deadline):
    queue = a_queue(*(a_work(1, due, width) for due, width in works))

    assert round(queue.rows_before(deadline), 6) == sum(due <= deadline for due, _ in works)
