"""A bound that no policy passes: by hand, above brute force, and above all that is simulated."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from benchmarks.harness.grid import Cell
from benchmarks.papers.one_stage import FULL_BATCH
from benchmarks.papers.otas import METHODS, measure, measure_ceiling
from benchmarks.papers.otas_ceiling import SLOT_SECONDS, max_utility
from benchmarks.papers.otas_model import GAMMAS, Option, Query, Requests, bursty_rps, draw_requests, synthetic_rps
from benchmarks.papers.otas_queries import BURSTY, OURS

FAST, GOOD = Option("fast", 16.0, {"t": 0.5}), Option("good", 4.0, {"t": 0.9})
HURRIED, PATIENT = Query("t", 0.5, 1.0), Query("t", 1.0, 0.1)


def asked(at_seconds: Sequence[float], types: Sequence[int]) -> Requests:
    return Requests(np.array(at_seconds), np.array(types))


def test_a_query_with_time_for_it_gets_the_best_point():
    assert max_utility(asked([0.0], [0]), [FAST, GOOD], [HURRIED]) == pytest.approx(0.9)


def test_more_than_the_seconds_allow_is_shared_between_points():
    """Six queries in 0.5 s: at `fast` they take 6/16 s; the 1/8 s left make 1/8 / (1/4 − 1/16) of them `good`."""
    found = max_utility(asked([0.0] * 6, [0] * 6), [FAST, GOOD], [HURRIED], slot_seconds=0.25 + 1e-9)

    assert found == pytest.approx(6 * 0.5 + (1 / 8) / (3 / 16) * 0.4, abs=1e-6)


def test_queries_are_answered_only_between_arrival_and_deadline():
    """A second passes between two floods, but none of them may use it."""
    flood = [0.0] * 100 + [2.0] * 100
    most = max_utility(asked(flood, [0] * 200), [FAST, GOOD], [HURRIED])

    assert 2 * 0.5 * FAST.rps * 0.5 <= most + 1e-6
    assert most <= 2 * (0.5 + SLOT_SECONDS) * FAST.rps * 0.5 + 1e-6


def test_who_is_worth_more_is_answered_first():
    found = max_utility(asked([0.0] * 60, [0] * 30 + [1] * 30), [FAST], [HURRIED, PATIENT], slot_seconds=0.5 - 1e-9)

    assert found >= 8 * 0.5 + 8 * 0.5 * 0.1
    assert found == pytest.approx(16 * 0.5 + 8 * 0.5 * 0.1, abs=1e-6), "slots that a deadline touches count whole"


def schedules(left: frozenset[int]) -> Iterator[list[tuple[int, ...]]]:
    """Every sequence of batches of some of these queries."""
    yield []
    for size in range(1, len(left) + 1):
        for batch in itertools.combinations(sorted(left), size):
            for rest in schedules(left - set(batch)):
                yield [batch, *rest]


def best_of_all(queries: Requests, options: Sequence[Option], kinds: Sequence[Query]) -> float:
    """The most utility of any schedule of batches, each at any point, by trying all of them."""
    best = 0.0
    for batches in schedules(frozenset(range(queries.at_seconds.size))):
        for points in itertools.product(options, repeat=len(batches)):
            best = max(best, value(queries, kinds, list(zip(batches, points, strict=True))))
    return best


def value(queries: Requests, kinds: Sequence[Query], batches: Sequence[tuple[tuple[int, ...], Option]]) -> float:
    now, found = 0.0, 0.0
    for batch, point in batches:
        now = max(now, *(float(queries.at_seconds[row]) for row in batch)) + point.seconds(len(batch))
        for row in batch:
            kind = kinds[queries.types[row]]
            if now <= queries.at_seconds[row] + kind.seconds:
                found += kind.utility * point.accuracy[kind.task]
    return found


@pytest.mark.parametrize("seed", range(25))
def test_no_schedule_of_batches_is_above_it(seed):
    rng = np.random.default_rng(seed)
    options = [Option("fast", 10.0 * FULL_BATCH, {"t": 0.5}), Option("good", 3.0 * FULL_BATCH, {"t": 0.9})]
    kinds = [Query("t", 0.03, 1.0), Query("t", 0.05, 0.2)]
    queries = asked(np.sort(rng.uniform(0.0, 0.05, 4)).tolist(), rng.integers(0, 2, 4).tolist())
    most, tried = max_utility(queries, options, kinds, slot_seconds=0.004), best_of_all(queries, options, kinds)

    assert tried <= most + 1e-9
    assert tried > 0.0 or most < sum(kinds[kind].utility for kind in queries.types)


def test_no_method_that_has_the_papers_list_alone_is_above_it():
    rates = bursty_rps(None, 0, 5)
    most = measure_ceiling(rates, Cell((BURSTY,), OURS, 1.6)).utility
    found = {
        name: measure(rates, Cell((BURSTY,), name, 1.6)).utility
        for name, method in METHODS.items()
        if method.has_paper_options_only
    }

    assert max(found.values()) <= most
    assert found[OURS] > 0.8 * most


def test_finer_slots_only_lower_it():
    requests = draw_requests(synthetic_rps(3, 1), 1.5, 1)
    coarse, fine = (max_utility(requests, GAMMAS, slot_seconds=slot) for slot in (0.1, 0.025))

    assert fine <= coarse + 1e-6
    assert fine > 0.95 * coarse
