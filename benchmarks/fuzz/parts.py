"""The parts of a run: what each generates, who meets it, its share of the requests, and which codes are our fault."""

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.fuzz import decoding, generated, sending
from benchmarks.hostile.door import Door
from benchmarks.hostile.kinds import NOTHING

GROUP = 20
DECODED = frozenset({decoding.OK, decoding.REFUSED})
FAULTS = frozenset({"500", "INTERNAL", NOTHING})
"""Codes that say the fault was ours."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part; `draw` is given its place in a group, `meet` a whole group."""

    share: float
    draw: Callable[[Random, int], Any]
    meet: Callable[[Door, list[Any]], Awaitable[list[str]]]
    decodes: bool = False

    def is_fault(self, code: str) -> bool:
        """Whether a code says that we were at fault."""
        return code not in DECODED if self.decodes else code.partition(":")[0] in FAULTS


PARTS = {
    "REST decoder": Part(0.2, lambda draw, _: generated.a_body(draw), decoding.bodies, decodes=True),
    "gRPC decoder": Part(0.2, lambda draw, _: generated.a_message(draw), decoding.messages, decodes=True),
    "REST bodies": Part(0.15, lambda draw, _: generated.an_http_request(draw), sending.http_requests),
    "gRPC messages": Part(0.15, lambda draw, _: generated.a_prefixed_message(draw), sending.messages),
    "REST behind the door": Part(
        0.05, lambda draw, _: generated.an_http_request(draw), sending.http_requests_behind_the_door
    ),
    "broken HTTP/1.1 behind the door": Part(
        0.15, lambda draw, _: generated.a_broken_http_request(draw), sending.broken_http_requests_behind_the_door
    ),
    "gRPC behind the door": Part(0.1, lambda draw, _: generated.a_call_as_http1(draw), sending.calls_behind_the_door),
}


@dataclass(slots=True)
class Fuzzed:
    """What came of a run."""

    codes: dict[str, Counter[str]] = field(default_factory=lambda: {part: Counter() for part in PARTS})
    faults: list[str] = field(default_factory=list)
    memory_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)

    def note(self, part: str, first: int, codes: list[str]) -> None:
        """Count a group's codes; keep what says that we were at fault, with the number of its request."""
        self.codes[part].update(codes)
        met = enumerate(codes, first)
        self.faults += [f"{part}/{number}: {code}" for number, code in met if PARTS[part].is_fault(code)]

    @property
    def first_faults(self) -> list[str]:
        """The first of each part and code, without what stands in a code for one request alone."""
        first: dict[tuple[str, str], str] = {}
        for fault in self.faults:
            name, _, code = fault.partition(": ")
            first.setdefault((name.partition("/")[0], code[:40]), fault)
        return list(first.values())


def groups(requests: int) -> Iterator[tuple[str, range]]:
    """The numbers of each part's requests in groups, the parts in turn, so that each runs from beginning to end."""
    shares = {name: round(requests * part.share) for name, part in PARTS.items()}
    turns = [
        [(name, range(n, min(n + GROUP, total))) for n in range(0, total, GROUP)] for name, total in shares.items()
    ]
    return (group for turn in itertools.zip_longest(*turns) for group in turn if group is not None)


def request(seed: int, part: str, number: int) -> Any:
    """One request, drawn from seed, part and number alone."""
    draw = Random(f"{seed} {part} {number}")  # noqa: S311 - to be drawn again
    return PARTS[part].draw(draw, number % GROUP)
