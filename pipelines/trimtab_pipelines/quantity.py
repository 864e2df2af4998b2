"""Kubernetes quantities and durations, parsed into numbers.

`500m` cores become 0.5, `256Mi` bytes become 268435456 and `250ms` becomes 0.25 seconds. Numbers are serialized in the
shortest form that parses to the same number.
"""

import math
import re
from decimal import Decimal
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationInfo, WithJsonSchema

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
AS_WRITTEN = {"as_written": True}
"""Validation context of a document written by a user, in which a duration needs its unit."""


def parse_quantity(written: object) -> float:
    """Parse a Kubernetes quantity; ValueError shows the valid form."""
    if isinstance(written, bool) or not isinstance(written, int | float | str):
        raise ValueError(f"{written!r} is not a quantity; write a number such as 2, 0.5, 500m or 256Mi")
    if isinstance(written, int | float):
        amount = float(written)
    else:
        match = _QUANTITY.match(written)
        if match is None:
            raise ValueError(f"{written!r} is not a quantity; write a number such as 2, 0.5, 500m or 256Mi")
        amount = float(Decimal(match[1]) * _SUFFIXES[match[2]])
    if not math.isfinite(amount) or amount < 0:
        raise ValueError(f"{written!r} is not a quantity; it must be finite and not negative")
    return amount


def parse_duration(written: object) -> float:
    """Parse `250ms`, `1.5s`, `2m` or `1h` into seconds; a number is in seconds."""
    if isinstance(written, bool) or not isinstance(written, int | float | str):
        raise ValueError(f"{written!r} is not a duration; write for instance 250ms, 1.5s or 2m")
    if isinstance(written, int | float):
        seconds = float(written)
    else:
        match = _DURATION.match(written)
        if match is None:
            raise ValueError(f"{written!r} is not a duration; write for instance 250ms, 1.5s or 2m")
        seconds = float(Decimal(match[1]) * _DURATION_UNITS[match[2]])
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"{written!r} is not a duration; it must be finite and not negative")
    return seconds


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


Cores = Annotated[
    float,
    BeforeValidator(parse_quantity),
    PlainSerializer(format_cores, when_used="json"),
    WithJsonSchema({"type": ["string", "number"], "pattern": QUANTITY_PATTERN, "examples": ["2", "500m"]}),
]
Bytes = Annotated[
    int,
    BeforeValidator(lambda written: int(parse_quantity(written))),
    PlainSerializer(format_bytes, when_used="json"),
    WithJsonSchema({"type": ["string", "number"], "pattern": QUANTITY_PATTERN, "examples": ["256Mi"]}),
]
Seconds = Annotated[
    float,
    BeforeValidator(_parse_duration),
    PlainSerializer(format_duration, when_used="json"),
    WithJsonSchema({"type": "string", "maxLength": 32, "pattern": DURATION_PATTERN, "examples": ["250ms", "1.5s"]}),
]
Fraction = Annotated[float, Field(ge=0, le=1, description="Between 0 and 1.")]
