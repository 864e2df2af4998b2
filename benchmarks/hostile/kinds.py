"""Kinds of hostile behaviour, and the check of the response to each."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

CUT, LEFT, KEPT, NOTHING, HTTP2 = "cut", "left", "kept", "nothing", "h2"
"""The connection was ended; the caller itself left; the connection still works; no word within the patience; the
answer to HTTP/1.1 was HTTP/2."""
RST, GOAWAY = "RST", "GOAWAY"
ENDED = frozenset({CUT, RST, GOAWAY})
BAD_REQUEST = ENDED | {"400"}
TOO_LARGE = BAD_REQUEST | {"413", "414", "431", "429"}
TOO_SLOW = ENDED | {"400", "408", "413", "429", "504", "DEADLINE_EXCEEDED", "UNAVAILABLE", "RESOURCE_EXHAUSTED"}
TOO_SLOW |= {"CANCELLED", "UNKNOWN"}
INVALID = ENDED | {"INVALID_ARGUMENT"}
TOO_MUCH = INVALID | {"RESOURCE_EXHAUSTED", "UNKNOWN"}
BROKEN = ENDED | {"400", "404", "431", "INVALID_ARGUMENT", "INTERNAL", "UNIMPLEMENTED", "UNKNOWN"}
"""INTERNAL and UNKNOWN are what a proxy makes of 400, 413 and 431 for callers that speak gRPC."""

Act = Callable[[Any], Awaitable[Iterable[str]]]
"""Behaves so against a `Door`; returns the code of each thing it did."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of behaviour: how it acts, and which codes are right for it."""

    family: str
    name: str
    act: Act
    right: frozenset[str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a kind met: how often each code, and which of them are not right."""

    seen: Counter[str]
    wrong: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether it met something, and all of it was right."""
        return bool(self.seen) and not self.wrong

    def __str__(self) -> str:
        return ", ".join(code if n == 1 else f"{n} × {code}" for code, n in sorted(self.seen.items())) or NOTHING


def judge(right: frozenset[str], seen: Iterable[str]) -> Verdict:
    """Judge codes: one is right if it is among those given, or what stands before its colon is (`RST:CANCEL`)."""
    counted = Counter(seen)
    return Verdict(counted, tuple(sorted(code for code in counted if not {code, code.partition(":")[0]} & right)))


class Family:
    """Collects the kinds of one module: `@FAMILY.kind("name", {"400"})` before the function that acts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.kinds: list[Kind] = []

    def kind(self, name: str, right: Iterable[str]) -> Callable[[Act], Act]:
        """Add the function that follows as a kind."""

        def add(act: Act) -> Act:
            self.kinds.append(Kind(self._name, name, act, frozenset(right)))
            return act

        return add
