"""Extraction of large fields from a protobuf message without parsing it.

A large ModelInferRequest is nearly all raw tensors. protobuf would copy each of them twice; here they stay in the
received buffer, and only the rest is parsed by protobuf, whose objects are many times larger than their encoding.
"""

from trimtab_protocol.errors import ProtocolError
from trimtab_protocol.tensors import Buffer

MAX_FIELDS = 4096
_LENGTH_DELIMITED = 2
_MAX_VARINT_BYTES = 10


def extract_field(message: Buffer, field: int, max_other_bytes: int) -> tuple[bytes, list[memoryview]]:
    """Split a message: the message without the bytes field of this number, and the field's values as views.

    Raises ProtocolError if the message is invalid, has too many fields, or more than `max_other_bytes` of others.
    """
    view = memoryview(message).cast("B")
    extracted: list[memoryview] = []
    rest: list[memoryview] = []
    position, rest_bytes, fields = 0, 0, 0
    while position < view.nbytes:
        begins = position
        tag, position = _varint(view, position)
        value, position = _skip(view, position, tag & 7)
        fields += 1
        if fields > MAX_FIELDS:
            raise ProtocolError(f"the message has more than {MAX_FIELDS} fields; send fewer tensors")
        if tag == field << 3 | _LENGTH_DELIMITED:
            extracted.append(value)
            continue
        rest.append(view[begins:position])
        rest_bytes += position - begins
        if rest_bytes > max_other_bytes:
            raise ProtocolError(
                f"the message has more than {max_other_bytes} bytes besides raw contents; "
                "send large tensors as raw_input_contents"
            )
    return b"".join(rest), extracted


def _skip(view: memoryview, position: int, kind: int) -> tuple[memoryview, int]:
    match kind:
        case 0:
            _, end = _varint(view, position)
        case 1:
            end = position + 8
        case 2:
            length, position = _varint(view, position)
            end = position + length
        case 5:
            end = position + 4
        case _:
            raise ProtocolError(f"the message is no protobuf: wire type {kind}")
    if end > view.nbytes:
        raise ProtocolError("the message is no ModelInferRequest of Open Inference Protocol V2: it is cut off")
    return view[position:end], end


def _varint(view: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(view[position : position + _MAX_VARINT_BYTES]):
        value |= (byte & 127) << 7 * index
        if byte <= 127:
            return value, position + index + 1
    raise ProtocolError("the message is no ModelInferRequest of Open Inference Protocol V2: cut off, or no protobuf")
