"""Tensors of the Open Inference Protocol, as numpy arrays that share the received memory.

The protocol has three encodings: raw little-endian bytes (both transports), JSON lists (REST) and typed repeated fields
(gRPC). All three are decoded to a `Tensor`. The raw form is decoded without a copy and encoded as a view.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isfinite, prod
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trimtab_protocol.errors import ProtocolError

Buffer = bytes | bytearray | memoryview
Array = NDArray[Any]

BFLOAT16 = "BF16"
BYTES = "BYTES"
MAX_RANK = 32
MAX_TENSORS = 256
MAX_BYTES_ELEMENTS = 2**17
"""Per BYTES tensor; each element is a Python object."""
SLOW_BYTES = 2**20
SLOW_VALUES_BYTES = 2**15
SLOW_BYTES_ELEMENTS = 2**12
MAX_ELEMENTS = 2**40
LENGTH_PREFIX_BYTES = 4

DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "BOOL": np.dtype(np.bool_),
        "UINT8": np.dtype("u1"),
        "UINT16": np.dtype("<u2"),
        "UINT32": np.dtype("<u4"),
        "UINT64": np.dtype("<u8"),
        "INT8": np.dtype("i1"),
        "INT16": np.dtype("<i2"),
        "INT32": np.dtype("<i4"),
        "INT64": np.dtype("<i8"),
        "FP16": np.dtype("<f2"),
        "FP32": np.dtype("<f4"),
        "FP64": np.dtype("<f8"),
        BFLOAT16: np.dtype("<u2"),  # numpy has no bfloat16; the bits are passed through
        BYTES: np.dtype(object),
    }
)
DATATYPES = {dtype: name for name, dtype in DTYPES.items() if name != BFLOAT16}
"""Datatypes by their NumPy dtype."""
_JSON_TYPES: Mapping[str, tuple[frozenset[type], str]] = {
    "BOOL": (frozenset({bool}), "true or false"),
    "FP": (frozenset({int, float}), "numbers"),
    "INT": (frozenset({int}), "integers"),
    "UINT": (frozenset({int}), "non-negative integers"),
    BYTES: (frozenset({str}), "strings"),
}


class TensorLike(Protocol):
    """A tensor's name, datatype and shape."""

    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(slots=True, eq=False)  # frozen would double the cost of construction
class Tensor:
    """One named tensor. Treat it as immutable.

    `array` has the dtype that `DTYPES` gives for `datatype`; BYTES are an object array of `bytes`, BF16 the raw bits
    as uint16. An array decoded from the wire is read-only and keeps the received buffer alive.
    """

    name: str
    datatype: str
    array: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @classmethod
    def of(cls, name: str, array: Array) -> "Tensor":
        """Wrap a numpy array; the datatype follows from its dtype.

        Raises ProtocolError if no datatype of the protocol holds this dtype.
        """
        datatype = DATATYPES.get(array.dtype)
        if datatype is None:
            raise ProtocolError(
                f"tensor {name!r}: numpy dtype {array.dtype} has no datatype; use one of {', '.join(DTYPES)}"
            )
        return cls(name, datatype, array)


def dtype_of(name: str, datatype: object) -> np.dtype[Any]:
    """The numpy dtype of a datatype; ProtocolError for an unknown one."""
    dtype = DTYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise unknown_datatype(name, datatype)
    return dtype


def unknown_datatype(name: str, datatype: object) -> ProtocolError:
    return ProtocolError(f"tensor {name!r}: unknown datatype {datatype!r}; use one of {', '.join(DTYPES)}")


def checked_shape(name: str, shape: Iterable[object]) -> tuple[int, ...]:
    """Require non-negative integers whose product is addressable; ProtocolError otherwise."""
    dims: tuple[Any, ...] = tuple(shape)
    elements = 1
    if len(dims) > MAX_RANK:
        raise ProtocolError(f"tensor {name!r}: {len(dims)} dimensions are too many; at most {MAX_RANK}")
    for dim in dims:
        if type(dim) is not int or dim < 0:  # bool is a subclass of int
            raise ProtocolError(f"tensor {name!r}: shape {list(dims)} must hold integers of at least 0")
        elements *= dim or 1
    if elements > MAX_ELEMENTS:
        raise ProtocolError(f"tensor {name!r}: shape {list(dims)} has too many elements; at most {MAX_ELEMENTS}")
    return dims


def is_slow(tensors: Iterable[TensorLike], *, whole_bytes: int, values_bytes: int) -> bool:
    """Whether decoding takes more than about a millisecond."""
    strings = 0
    for tensor in tensors:
        if tensor.datatype == BYTES:
            strings += prod(tensor.shape)
    return whole_bytes > SLOW_BYTES or values_bytes > SLOW_VALUES_BYTES or strings > SLOW_BYTES_ELEMENTS


def decode_raw(name: str, datatype: object, shape: Iterable[object], buffer: Buffer) -> Tensor:
    """Read a tensor from its raw bytes without copying them (BYTES excepted).

    Raises ProtocolError if the datatype or the shape is invalid, or the bytes do not fit them.
    """
    dtype_of(name, datatype)
    return view_raw(name, str(datatype), checked_shape(name, shape), buffer)


def view_raw(name: str, datatype: str, dims: tuple[int, ...], buffer: Buffer) -> Tensor:
    """`decode_raw` of a known datatype and a checked shape."""
    if datatype == BYTES:
        return Tensor(name, BYTES, _decode_bytes(name, dims, bytes(buffer)))
    dtype, received = DTYPES[datatype], memoryview(buffer).nbytes
    expected = prod(dims) * dtype.itemsize
    if received != expected:
        raise ProtocolError(f"tensor {name!r}: shape {list(dims)} of {datatype} needs {expected} bytes; got {received}")
    return Tensor(name, datatype, np.frombuffer(buffer, dtype).reshape(dims) if expected else np.empty(dims, dtype))


def encode_raw(tensor: Tensor) -> Buffer:
    """Raw bytes of a tensor: a view if it is contiguous, else a copy."""
    return encode_raw_array(tensor.array)


def encode_raw_array(array: Array) -> Buffer:
    if array.dtype.hasobject:
        return _encode_bytes(array)
    if not array.size:
        return b""
    view = array.data
    return view.cast("B") if view.c_contiguous else np.ascontiguousarray(array).data.cast("B")


def from_values(name: str, datatype: object, shape: Iterable[object], values: object) -> Tensor:
    """Read a tensor from the JSON form: a list, nested by the shape or flat in row order.

    Raises ProtocolError if type, range or number of the values do not fit datatype and shape.
    """
    dtype = dtype_of(name, datatype)
    dims = checked_shape(name, shape)
    if datatype == BFLOAT16:
        raise ProtocolError(f"tensor {name!r}: BF16 has no JSON form; send it as binary data")
    flat = _flatten(name, dims, values)
    allowed, words = _JSON_TYPES[str(datatype).rstrip("0123456789")]
    wrong = set(map(type, flat)) - allowed
    if wrong:
        kinds = ", ".join(sorted(kind.__name__ for kind in wrong))
        raise ProtocolError(f"tensor {name!r}: data of {datatype} must be {words}, but holds {kinds}")
    if len(flat) != prod(dims):
        raise ProtocolError(f"tensor {name!r}: shape {list(dims)} needs {prod(dims)} elements; got {len(flat)}")
    return Tensor(name, str(datatype), _array_of(name, str(datatype), dtype, flat).reshape(dims))


def to_values(tensor: Tensor) -> list[Any]:
    """JSON form of a tensor: a flat list in row order; NaN and infinities become null."""
    if tensor.datatype == BFLOAT16:
        raise ProtocolError(f"tensor {tensor.name!r}: BF16 has no JSON form; ask for binary data")
    values: list[Any] = tensor.array.reshape(-1).tolist()
    if tensor.datatype.startswith("FP") and not np.isfinite(tensor.array).all():
        return [value if isfinite(value) else None for value in values]
    if tensor.datatype != BYTES:
        return values
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError as error:
        raise ProtocolError(f"tensor {tensor.name!r}: its bytes are not UTF-8; ask for binary data") from error


def bytes_array(values: Sequence[bytes], shape: tuple[int, ...]) -> Array:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array.reshape(shape)


def _flatten(name: str, dims: tuple[int, ...], values: object) -> list[Any]:
    if not isinstance(values, list):
        raise ProtocolError(f"tensor {name!r}: data must be a list")
    flat: list[Any] = values
    if not any(isinstance(value, list) for value in flat):
        return flat
    for depth, size in enumerate(dims):
        if len(flat) != prod(dims[: depth + 1]):
            raise ProtocolError(f"tensor {name!r}: nested data does not have shape {list(dims)}")
        if depth == len(dims) - 1:
            break
        following = dims[depth + 1]
        if not all(isinstance(value, list) and len(value) == following for value in flat):
            raise ProtocolError(
                f"tensor {name!r}: nested data does not have shape {list(dims)} below dimension {depth} of {size}"
            )
        flat = list(chain.from_iterable(flat))
    return flat


def _array_of(name: str, datatype: str, dtype: np.dtype[Any], flat: list[Any]) -> Array:
    try:
        if datatype == BYTES:
            return bytes_array([value.encode() for value in flat], (len(flat),))
        with np.errstate(over="ignore"):
            return np.array(flat, dtype=dtype)
    except OverflowError as error:
        raise ProtocolError(f"tensor {name!r}: a value does not fit {datatype}") from error
    except UnicodeEncodeError as error:
        raise ProtocolError(f"tensor {name!r}: a string holds half a surrogate pair; send valid Unicode") from error


def _decode_bytes(name: str, dims: tuple[int, ...], data: bytes) -> Array:
    expected = prod(dims)
    if expected > MAX_BYTES_ELEMENTS:
        raise ProtocolError(
            f"tensor {name!r}: {expected} elements of BYTES are too many; send at most {MAX_BYTES_ELEMENTS}"
        )
    values: list[bytes] = []
    position, end = 0, len(data)
    while position < end and len(values) <= expected:
        start = position + LENGTH_PREFIX_BYTES
        position = start + int.from_bytes(data[position:start], "little")
        if position > end or start > end:
            raise ProtocolError(
                f"tensor {name!r}: element {len(values)} of its BYTES ends past the data; a 4-byte length precedes each"
            )
        values.append(data[start:position])
    if len(values) != expected:
        received = "more" if len(values) > expected else len(values)
        raise ProtocolError(f"tensor {name!r}: shape {list(dims)} needs {expected} elements; got {received}")
    return bytes_array(values, dims)


def _encode_bytes(array: Array) -> bytes:
    pieces: list[bytes] = []
    for value in array.reshape(-1):
        encoded = value.encode() if isinstance(value, str) else bytes(value)
        pieces.append(len(encoded).to_bytes(LENGTH_PREFIX_BYTES, "little"))
        pieces.append(encoded)
    return b"".join(pieces)
