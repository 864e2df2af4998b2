"""Generated requests: drawn again from the same seed, changed but not beyond use, and each part gets its share."""

import json
from collections import Counter
from random import Random

import pytest

from benchmarks.fuzz.__main__ import PARTS, Fuzzed, groups
from benchmarks.fuzz.decoding import decode_body, decode_message
from benchmarks.fuzz.generated import a_body, a_broken_http_request, a_prefixed_message, an_http_request, call_frames
from benchmarks.fuzz.mutations import LONGEST_BYTES, mutate_bytes, mutate_json

GENERATORS = [a_body, an_http_request, a_broken_http_request, a_prefixed_message, lambda draw: call_frames(draw, 1)]


@pytest.mark.parametrize("generate", GENERATORS)
def test_the_same_draw_makes_the_same_request(generate):
    drawn = [generate(Random(f"7 {n}")) for n in range(300)]

    assert drawn == [generate(Random(f"7 {n}")) for n in range(300)]
    assert len({str(one) for one in drawn}) > 200


def test_mutations_leave_what_they_were_given_alone():
    value = {"inputs": [{"name": "x", "shape": [1, 2]}]}
    before = json.dumps(value)

    changed = [mutate_json(Random(n), value) for n in range(200)]

    assert json.dumps(value) == before
    assert sum(one != value for one in changed) > 150


def test_changed_bytes_stay_bounded():
    assert max(len(mutate_bytes(Random(n), bytes(LONGEST_BYTES))) for n in range(100)) <= LONGEST_BYTES
    assert {len(mutate_bytes(Random(n), b"")) for n in range(100)} > {0}


def test_some_generated_requests_are_still_served_and_most_are_not():
    for decode in (decode_body, decode_message):
        met = Counter(decode(Random(f"1 {n}")) for n in range(500))

        assert met["ok"] > 50
        assert met["refused"] > 100


@pytest.mark.parametrize("requests", [100, 1000, 100_000])
def test_every_part_gets_its_share_from_beginning_to_end(requests):
    numbers: dict[str, list[int]] = {part: [] for part in PARTS}
    for part, group in groups(requests):
        numbers[part] += group

    assert sum(map(len, numbers.values())) == requests
    for part, (share, _) in PARTS.items():
        assert numbers[part] == list(range(round(share * requests)))


def test_a_fault_is_kept_with_the_number_of_its_request():
    found = Fuzzed()
    found.note("REST decoder", 20, ["ok", "refused", "OverflowError: too large"])
    found.note("REST bodies", 40, ["400", "500", "200"])
    found.note("HTTP/2 frames", 60, ["RST:CANCEL", "waiting", "INTERNAL"])

    assert found.faults == [
        "REST decoder 22: OverflowError: too large",
        "REST bodies 41: 500",
        "HTTP/2 frames 62: INTERNAL",
    ]
