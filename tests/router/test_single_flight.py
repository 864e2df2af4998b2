"""Single-flight of rows that show the same image, without a network."""

from itertools import pairwise
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import a_pipeline
from tests.clocks import FakeClock
from tests.router.test_queue import Caller
from trimtab_router.scheduling.batch_completion import BatchCompletion
from trimtab_router.scheduling.policies.interface import Point
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.replica_slots import Batch, Completed, NotReady, ReplicaSlots
from trimtab_router.scheduling.single_flight import SingleFlight
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest

POINT = Point("default", 0.9, lambda _: 0.1)
LOST, MADE = NotReady(), Completed((), "default")


class Keeper:
    """Shares as long as it may."""

    def __init__(self, most=10**9):
        self.most = most
        self.shared = []
        self.fetched = []

    def share(self, batch, row):
        self.shared.append((batch, row))
        return len(self.shared) <= self.most

    def fetch(self, slot, variant, piece, came):  # noqa: ARG002 - of a keeper
        self.fetched.append((shown([piece]), came))


class Counts:
    """A tally."""

    def __init__(self):
        self.how = []

    def count_deduplicated_row(self, how):
        self.how.append(how)

    def add_replica(self, replica):
        pass

    def count_retry(self, reason):
        pass

    def record_replica_error(self, message):
        pass


def a_single_flight(keeper, queue, **changes):
    stage = a_pipeline(1).spec.stages[0]
    stats = cast("Any", Counts())
    completion = BatchCompletion(stage, queue, stats)
    return SingleFlight(
        cast("Any", keeper), queue, completion, **{"clock": FakeClock(), "stats": stats, "wake": lambda: None} | changes
    )


def a_slice(shows, deadline=1.0):
    work = StageRequest(Caller(), "encode", len(shows), {}, deadline=deadline, now=0.0)
    work.identities = list(shows)
    return RowSlice(work, 0, work.rows)


def a_batch(row_slices):
    rows = sum(row_slice.rows for row_slice in row_slices)
    return Batch(ReplicaSlots("one"), "v", POINT, row_slices, rows, 0.0, True)


def shown(pieces):
    return [piece.request.identities[row] for piece in pieces for row in range(piece.start, piece.stop)]


batches = st.lists(st.text("abcd", min_size=1, max_size=6), min_size=1, max_size=5)


@given(batches, batches, st.sampled_from([0, 1, 2, 60]))
def test_each_image_is_encoded_once_and_no_row_is_lost(leaving, waiting, most):
    keeper, queue = Keeper(most), DeadlineQueue(100)
    sharing = a_single_flight(keeper, queue)
    for number, shows in enumerate(waiting):
        queue.push(a_slice(shows, deadline=float(number)))
    unique = sharing.unique_rows([a_slice(shows) for shows in leaving])
    assert len(set(shown(unique))) == len(shown(unique)) == len(set("".join(leaving)))
    batch = a_batch(unique)
    sharing.on_dispatch(batch)

    all_rows = sorted("".join(leaving) + "".join(waiting))
    assert sorted(shown(unique) + shown(batch.joined_rows) + shown(queue)) == all_rows
    assert all(piece.rows == 1 for piece in batch.joined_rows)
    assert [shown(unique)[row] for _, row in keeper.shared[: len(batch.joined_rows)]] == shown(batch.joined_rows)
    has_client = {piece.request for piece in queue}
    assert queue.rows == len(shown(queue)) == sum(work.queued_rows for work in has_client)
    if most >= 5 * 6 * 2:
        assert not set(shown(queue)) & set(shown(unique))
    assert len(sharing) == len(shown(unique))
    sharing.on_batch_end(batch, LOST, 1.0)
    assert len(sharing) == 0
    assert sorted(shown(unique) + shown(queue)) == all_rows
    assert shown(sharing.join_in_flight(a_slice("abcd"))) == ["a", "b", "c", "d"]  # a completed batch is not joined
    assert all(one.request.deadline <= other.request.deadline for one, other in pairwise(queue))


def test_row_joins_the_batch_in_flight_with_its_image():
    keeper = Keeper()
    sharing = a_single_flight(keeper, DeadlineQueue(100))
    batch = a_batch([a_slice("xyz")])
    sharing.on_dispatch(batch)

    left = sharing.join_in_flight(a_slice("aybzc"))
    assert shown(left) == ["a", "b", "c"]
    assert [row for _, row in keeper.shared] == [1, 2]
    alone = a_slice("y")
    alone.alone = True
    assert sharing.join_in_flight(alone) == [alone]


def test_rows_of_closed_requests_are_forgotten():
    sharing = a_single_flight(Keeper(), DeadlineQueue(100))
    gone = a_slice("xy")
    gone.request.close()
    batch = a_batch([gone, a_slice("z")])
    sharing.on_dispatch(batch)
    assert sharing.join_in_flight(a_slice("z")) == []
    assert len(sharing) == 1


def test_producers_are_remembered_up_to_the_limit():
    keeper, queue, counts, wakes = Keeper(), DeadlineQueue(9), Counts(), []
    sharing = a_single_flight(keeper, queue, stats=counts, wake=lambda: wakes.append(1), max_producers=2)
    batch = a_batch([a_slice("xyz")])
    batch.replica.set_ready_variants(frozenset({"v"}))
    sharing.on_dispatch(batch)
    sharing.on_batch_end(batch, MADE, 1.0)

    asking = a_slice("xyaz")
    assert shown(sharing.on_enqueue(asking)) == ["x", "a"]  # x was forgotten for y and z
    (y, have_y), (z, have_z) = keeper.fetched
    assert (y, z) == (["y"], ["z"])
    have_y({"references": np.ones(1)})
    have_z(None)
    assert [start for start, _ in asking.request.owner.advanced] == [1]
    assert (shown(queue), wakes) == (["z"], [1])
    assert counts.how == ["cache"]
    assert shown(sharing.on_enqueue(a_slice("yz"))) == ["z"]
    batch.replica.set_ready_variants(frozenset())
    assert shown(sharing.on_enqueue(a_slice("y"))) == ["y"]


def test_replica_without_cache_is_asked_only_now_and_then():
    keeper, queue = Keeper(), DeadlineQueue(100)
    sharing = a_single_flight(keeper, queue)

    def asked(*, has: bool) -> bool:
        batch = a_batch([a_slice("x")])
        batch.replica.set_ready_variants(frozenset({"v"}))
        sharing.on_dispatch(batch)
        sharing.on_batch_end(batch, MADE, 1.0)
        before = len(keeper.fetched)
        sharing.on_enqueue(a_slice("x"))
        for _, came in keeper.fetched[before:]:
            came({"references": np.ones(1)} if has else None)
        while queue.rows:
            queue.pop()
        return len(keeper.fetched) > before

    assert all(asked(has=False) for _ in range(20))
    assert sum(asked(has=False) for _ in range(320)) <= 12
    for _ in range(320):
        asked(has=True)
    assert all(asked(has=True) for _ in range(20))
