"""Generated requests: drawn again from the same seed, changed but not beyond use, and each part gets its share."""

import json
from collections import Counter
from random import Random

import pytest

from benchmarks.fuzz.decoding import decode_body, decode_message
from benchmarks.fuzz.mutations import LONGEST_BYTES, mutate_bytes, mutate_json
from benchmarks.fuzz.parts import PARTS, Fuzzed, groups, request


@pytest.mark.parametrize("part", PARTS)
def test_the_same_seed_and_number_make_the_same_request(part):
    drawn = [request(7, part, n) for n in range(300)]

    assert drawn == [request(7, part, n) for n in range(300)]
    assert len({str(one) for one in drawn}) > 200
    assert drawn != [request(8, part, n) for n in range(300)]


def test_mutations_leave_what_they_were_given_alone():
    value = {"inputs": [{"name": "x", "shape": [1, 2]}]}
    before = json.dumps(value)

    changed = [mutate_json(Random(n), value) for n in range(200)]

    assert json.dumps(value) == before
    assert sum(one != value for one in changed) > 150


def test_changed_bytes_stay_bounded():
    assert max(len(mutate_bytes(Random(n), bytes(LONGEST_BYTES))) for n in range(100)) <= LONGEST_BYTES
    assert {len(mutate_bytes(Random(n), b"")) for n in range(100)} > {0}


def test_some_generated_requests_are_served_and_most_are_not():
    for part, decode in (("REST decoder", decode_body), ("gRPC decoder", decode_message)):
        met = Counter(decode(request(1, part, n)) for n in range(500))

        assert met["ok"] > 50
        assert met["refused"] > 100


@pytest.mark.parametrize("requests", [100, 1000, 100_000])
def test_every_part_gets_its_share_from_beginning_to_end(requests):
    numbers: dict[str, list[int]] = {part: [] for part in PARTS}
    for name, group in groups(requests):
        numbers[name] += group

    assert sum(map(len, numbers.values())) == requests
    for name, part in PARTS.items():
        assert numbers[name] == list(range(round(part.share * requests)))


def test_a_fault_is_kept_with_the_number_of_its_request():
    found = Fuzzed()
    found.note("REST decoder", 20, ["ok", "refused", "OverflowError: too large"])
    found.note("REST bodies", 40, ["400", "500", "200"])
    found.note("REST bodies", 60, ["500"])
    found.note("gRPC messages", 60, ["RST:CANCEL", "waiting", "INTERNAL"])

    first = ["REST decoder/22: OverflowError: too large", "REST bodies/41: 500", "gRPC messages/62: INTERNAL"]
    assert found.first_faults == first
    assert set(found.faults) == {*first, "REST bodies/60: 500"}
