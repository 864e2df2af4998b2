"""Small changes of a valid request. The same draw gives the same change."""

import copy
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

ODD_NUMBERS = (0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**400)
ODD_FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-300, 1e39, 1e308, float("nan"), float("inf"), float("-inf"))
ODD_TEXTS = (
    "",
    "x",
    "y",
    "€",
    "\ud800",
    "a\0b",
    "a\r\nx: 1",
    "A" * 3000,
    "%0a",
    "../..",
    "\u202e",
    "1",
    "FP32",
    "BYTES",
)
ODD_BYTES = (b"\0", b"\xff", b"\r\n", b"\r", b"\n", b" ", b":", b"\r\n\r\n", b"0\r\n\r\n", b"\x80", b"{", b"[", b'"')
DATATYPES = ("BOOL", "INT8", "INT32", "INT64", "UINT8", "UINT64", "FP16", "FP32", "FP64", "BYTES", "fp32", "", "evil")
LONGEST_BYTES = 64 * 1024


def odd_value(draw: Random) -> Any:
    """A JSON value that somebody may trip over."""
    pools: Sequence[Sequence[Any]] = (
        ODD_NUMBERS,
        ODD_FLOATS,
        ODD_TEXTS,
        DATATYPES,
        (None, True, False, [], {}, [[]], [1, "a"], {"": None}, {"binary_data_size": 8}),
    )
    value = draw.choice(draw.choice(pools))
    if draw.random() < 0.05:
        for _ in range(draw.randrange(400)):
            value = [value]
    return value


def mutate_json(draw: Random, value: Any) -> Any:
    """A copy of a JSON value with one place in it otherwise."""
    value = copy.deepcopy(value)
    owner, key = _place(draw, value)
    if owner is None:
        return odd_value(draw)
    match draw.randrange(5):
        case 0:
            del owner[key]
        case 1 if isinstance(owner, list):
            owner.insert(draw.randrange(len(owner) + 1), copy.deepcopy(owner[key]))
        case 2 if isinstance(owner, dict):
            owner[draw.choice(ODD_TEXTS)] = owner.pop(key)
        case 3 if isinstance(owner, dict):
            owner[draw.choice(("parameters", "shape", "data", "datatype", "name", "id", "outputs"))] = odd_value(draw)
        case _:
            owner[key] = odd_value(draw)
    return value


def _place(draw: Random, value: Any) -> tuple[Any, Any]:
    """A container within a value and one of its keys; (None, None) for the value itself."""
    owner: Any = None
    key: Any = None
    while isinstance(value, dict | list) and value and (owner is None or draw.random() < 0.7):
        owner, key = value, draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        value = owner[key]
    return owner, key


def mutate_bytes(draw: Random, data: bytes) -> bytes:
    """A copy with one change: bits, bytes or slices, replaced, put in, left out, doubled, or cut off."""
    at = draw.randrange(len(data) + 1)
    end = min(at + draw.randrange(1, 17), len(data))
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: data[:at] + bytes(byte ^ 1 << draw.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :],
        lambda: data[:at] + draw.randbytes(end - at) + data[end:],
        lambda: data[:at] + draw.choice(ODD_BYTES) + data[at:],
        lambda: data[:at] + data[end:],
        lambda: data[:end] + data[at:end] * draw.choice((1, 2, 50)) + data[end:],
        lambda: data[:at],
        lambda: (
            data[:at]
            + draw.choice(ODD_NUMBERS[:14]).to_bytes(16, "big", signed=True)[-draw.choice((1, 2, 4, 8)) :]
            + data[end:]
        ),
    )
    return draw.choice(changes)()[:LONGEST_BYTES]


def several(draw: Random, value: Any, change: Callable[[Random, Any], Any], most: int = 4) -> Any:
    """Change a value up to so many times; one in ten is left as it is."""
    if draw.random() < 0.1:
        return value
    for _ in range(draw.randint(1, most)):
        value = change(draw, value)
    return value
