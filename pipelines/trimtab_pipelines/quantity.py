"""Kubernetes quantities and durations, parsed into numbers.

`500m` cores become 0.5, `256Mi` bytes become 268435456 and `250ms` becomes 0.25 seconds. Numbers are serialized in the
shortest form that parses to the same number.
"""

import math
import re
import reprlib
import sys
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, ValidationInfo, WithJsonSchema

_SUFFIXES = {
    "": Decimal(1),
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
}
QUANTITY_PATTERN = r"^([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(n|u|m|k|M|G|T|Ki|Mi|Gi|Ti|)$"
_QUANTITY = re.compile(QUANTITY_PATTERN)
_DURATION_UNITS = {"ms": Decimal("1e-3"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}
DURATION_PATTERN = r"^([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ms|s|m|h)$"
_DURATION = re.compile(DURATION_PATTERN)
MAX_LENGTH = 32
MAX_NUMBER = 2**63 - 1
"""Largest quantity and integer of Kubernetes."""
MAX_SECONDS = 366 * 86400
AS_WRITTEN = {"as_written": True}
"""Validation context of a document written by a user, in which a duration needs its unit."""


def parse_quantity(written: object) -> float:
    """Parse a Kubernetes quantity; ValueError shows the valid form."""
    advice = "write a number such as 2, 0.5, 500m or 256Mi"
    return _parse(written, _QUANTITY, _SUFFIXES, "a quantity", advice, MAX_NUMBER)


def parse_duration(written: object) -> float:
    """Parse `250ms`, `1.5s`, `2m` or `1h` into seconds; a number is in seconds."""
    advice = "write for instance 250ms, 1.5s or 2m"
    return _parse(written, _DURATION, _DURATION_UNITS, "a duration", advice, MAX_SECONDS)


def _parse(
    written: object, form: re.Pattern[str], units: Mapping[str, Decimal], kind: str, advice: str, most: float
) -> float:
    match = form.match(written) if isinstance(written, str) and len(written) <= MAX_LENGTH else None
    if match is not None:
        number = float(Decimal(match[1]) * units[match[2]])
    elif isinstance(written, int | float) and not isinstance(written, bool):
        number = math.inf if written > sys.float_info.max else float(written)
    else:
        raise ValueError(f"{reprlib.repr(written)} is not {kind}; {advice}")
    if not 0 <= number <= most:
        raise ValueError(f"{reprlib.repr(written)} is not {kind}; it must be between 0 and {most:.4g}")
    return number


def _parse_duration(written: object, info: ValidationInfo) -> float:
    """`parse_duration`, but a number in a document is an error, since 400 may be meant as milliseconds."""
    seconds = parse_duration(written)
    if info.context is AS_WRITTEN and isinstance(written, int | float):
        raise ValueError(f"{written!r} has no unit; write {written}ms or {written}s")
    return seconds


def format_cores(cores: float) -> str:
    """Format cores, in millicores unless whole."""
    return f"{cores:.0f}" if cores == round(cores) else f"{Decimal(repr(cores)) * 1000:f}".rstrip("0").rstrip(".") + "m"


def format_bytes(size: float) -> str:
    """Format bytes with the largest binary suffix that leaves a whole number."""
    for suffix in ("Gi", "Mi", "Ki"):
        unit = int(_SUFFIXES[suffix])
        if size and size % unit == 0:
            return f"{int(size) // unit}{suffix}"
    return str(int(size))


def format_duration(seconds: float) -> str:
    """Format seconds, in milliseconds unless whole."""
    if seconds == round(seconds):
        return f"{seconds:.0f}s"
    return f"{Decimal(repr(seconds)) * 1000:f}".rstrip("0").rstrip(".") + "ms"


def _require_sizes(seconds_by_size: dict[int, float]) -> dict[int, float]:
    for size, seconds in seconds_by_size.items():
        if not (1 <= size <= MAX_NUMBER and 0 <= seconds <= MAX_NUMBER):
            raise ValueError(f"{seconds:g} seconds for {reprlib.repr(size)}; write sizes from 1 and seconds from 0")
    return seconds_by_size


_QUANTITY_SCHEMA = {"type": ["string", "number"], "maxLength": MAX_LENGTH, "pattern": QUANTITY_PATTERN}
Cores = Annotated[
    float,
    BeforeValidator(parse_quantity),
    PlainSerializer(format_cores, when_used="json"),
    WithJsonSchema({**_QUANTITY_SCHEMA, "examples": ["2", "500m"]}),
]
Amount = Annotated[
    float,
    BeforeValidator(parse_quantity),
    PlainSerializer(lambda amount: f"{Decimal(repr(amount)):f}".removesuffix(".0"), when_used="json"),
    WithJsonSchema({**_QUANTITY_SCHEMA, "examples": ["2", "0.35"]}),
]
Bytes = Annotated[
    int,
    BeforeValidator(lambda written: int(parse_quantity(written))),
    PlainSerializer(format_bytes, when_used="json"),
    WithJsonSchema({**_QUANTITY_SCHEMA, "examples": ["256Mi"]}),
]
Seconds = Annotated[
    float,
    BeforeValidator(_parse_duration),
    PlainSerializer(format_duration, when_used="json"),
    WithJsonSchema(
        {"type": "string", "maxLength": MAX_LENGTH, "pattern": DURATION_PATTERN, "examples": ["250ms", "1.5s"]}
    ),
]
SecondsBySize = Annotated[dict[int, float], AfterValidator(_require_sizes)]
Fraction = Annotated[float, Field(ge=0, le=1, description="Between 0 and 1.")]
