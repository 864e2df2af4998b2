"""Random requests: valid ones with changes of their structure or of their bytes. The same `Random` gives the same."""

import copy
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np

from tests.security.conftest import INFER, MODEL
from tests.security.raw_http import INFER_CALL, grpc_frame, grpc_post, post
from trimtab_protocol.grpc_messages import request_class

ODD_NUMBERS = (0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**400)
ODD_FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-300, 1e39, 1e308, float("nan"), float("inf"), float("-inf"))
ODD_TEXTS = ("", "x", "y", "€", "a\0b", "a\r\nx: 1", "A" * 3000, "%0a", "../..", "\u202e", "1", "FP32", "BYTES")
ODD_BYTES = (b"\0", b"\xff", b"\r\n", b"\n", b" ", b":", b"\r\n\r\n", b"0\r\n\r\n", b"\x80", b"{", b"[", b'"')
DATATYPES = ("BOOL", "INT8", "INT32", "INT64", "UINT8", "UINT64", "FP16", "FP32", "FP64", "BYTES", "fp32", "", "evil")
MAX_BYTES = 64 * 1024
GRPC_LINES = ["x-request-id: 1", "grpc-encoding: gzip", "grpc-encoding: \xe9", "x-trimtab-client: a"]
GRPC_LINES += [f"grpc-timeout: {text}" for text in ("1S", "1n", "99999999H", "-1S", "1", "\xb2S", "")]
GRPC_LINES += ["x-request-id: \xff\xfe", "x-request-id: " + "a" * 3000, "traceparent: 00-1", "Content-Encoding: gzip"]
GRPC_PATHS = ("/inference.GRPCInferenceService/ServerLive", "/inference.GRPCInferenceService/ServerLiv")


class Body(NamedTuple):
    """A REST body, and the header that gives the length of its JSON part, if any."""

    content: bytes
    header_length: str | None


def rest_body(draw: Random) -> Body:
    """A JSON or binary request with changes."""
    tensor, raw = _tensor(draw)
    request: Any = {"id": "1", "inputs": [tensor], "parameters": {"timeout": 2_000_000}, "outputs": [{"name": "y"}]}
    for _ in range(0 if draw.random() < 0.1 else draw.randint(1, 4)):
        request = change_json(draw, request)
    header = json.dumps(request).encode()
    length: str | None = str(len(header)) if raw else None
    if draw.random() < 0.1:
        length = str(draw.choice((*ODD_NUMBERS, *ODD_TEXTS[:3], -5, len(header) // 2, "9" * 5000)))
    content = header + raw
    return Body(change_bytes(draw, content) if draw.random() < 0.3 else content, length)


def _tensor(draw: Random) -> tuple[dict[str, Any], bytes]:
    """A valid tensor with its data in JSON or binary; a third have datatypes that the pipeline does not accept."""
    rows, width = draw.randint(1, 3), draw.randint(1, 4)
    tensor: dict[str, Any] = {"name": "x", "shape": [rows, width], "datatype": "FP32"}
    match draw.randrange(9):
        case 0:
            tensor |= {"datatype": "BYTES", "data": [draw.choice(ODD_TEXTS)] * rows * width}
        case 1:
            raw = (len(b"text").to_bytes(4, "little") + b"text") * rows * width
            return {**tensor, "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}, raw
        case 2:
            tensor |= {"datatype": draw.choice(DATATYPES), "data": [draw.choice((0, 1))] * rows * width}
        case 3 | 4 | 5:
            tensor["data"] = [float(draw.randrange(1000))] * rows * width
        case _:
            raw = np.full((rows, width), draw.randrange(1000), np.float32).tobytes()
            return {**tensor, "parameters": {"binary_data_size": len(raw)}}, raw
    return tensor, b""


def rest_request(draw: Random) -> bytes:
    """A POST with valid framing and a random body."""
    body = rest_body(draw)
    lines = []
    if body.header_length is not None and body.header_length.isprintable() and body.header_length.isascii():
        lines.append(f"Inference-Header-Content-Length: {body.header_length}")
    others = ("/v2/models/x/infer", INFER + "/", f"/v2/models/{MODEL}/versions/2/infer")
    return post(INFER if draw.random() < 0.9 else draw.choice(others), body.content, *lines)


def grpc_message(draw: Random) -> bytes:
    """A ModelInferRequest with changes of its fields or its bytes."""
    request: Any = request_class("ModelInfer")(model_name=MODEL, id="1")
    request.parameters["timeout"].int64_param = 2_000_000
    rows, width = draw.randint(1, 3), draw.randint(1, 4)
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[rows, width])
    if draw.random() < 0.5:
        request.raw_input_contents.append(draw.randbytes(4 * rows * width))
    else:
        tensor.contents.fp32_contents.extend([1.0] * rows * width)
    if draw.random() < 0.9:
        for _ in range(draw.randint(1, 3)):
            _change_field(draw, request, tensor)
    serialized: bytes = request.SerializeToString()
    return change_bytes(draw, serialized) if draw.random() < 0.4 else serialized


def _change_field(draw: Random, request: Any, tensor: Any) -> None:
    text, number = draw.choice(ODD_TEXTS), draw.choice([number for number in ODD_NUMBERS if number < 2**63])
    match draw.randrange(10):
        case 0:
            request.id = text
        case 1:
            tensor.name = text
        case 2:
            tensor.datatype = draw.choice(DATATYPES)
        case 3:
            tensor.shape.append(number)
        case 4:
            tensor.shape[:] = [number, draw.choice((1, -1, number))]
        case 5:
            request.raw_input_contents.append(draw.randbytes(draw.randrange(40)))
        case 6:
            fields = (("int64_param", number), ("string_param", text), ("double_param", float("nan")))
            field, value = draw.choice(fields)
            setattr(request.parameters[draw.choice(("timeout", "priority", text))], field, value)
        case 7:
            request.outputs.add(name=draw.choice(("y", text)))
        case 8:
            request.inputs.add().CopyFrom(tensor)
        case _:
            tensor.contents.bytes_contents.append(draw.randbytes(draw.randrange(20)))


def grpc_call(draw: Random) -> bytes:
    """A call as Envoy passes it to the router; one prefix in ten is wrong."""
    body = grpc_message(draw)
    lengths = (0, len(body) + 1, max(len(body) - 1, 0), 2**32 - 1, 2**20)
    is_valid = draw.random() < 0.9
    framed = (
        grpc_frame(body) if is_valid else grpc_frame(body, flag=draw.choice((0, 1, 2)), length=draw.choice(lengths))
    )
    path = INFER_CALL if draw.random() < 0.9 else draw.choice((*GRPC_PATHS, "/grpc.health.v1.Health/Check"))
    return grpc_post(framed, *draw.sample(GRPC_LINES, draw.randrange(3)), path=path)


def odd_value(draw: Random) -> Any:
    """A JSON value that is hard to handle; some are nested."""
    others: tuple[Any, ...] = (None, True, False, [], {}, [[]], [1, "a"], {"": None}, {"binary_data_size": 8})
    pools: Sequence[Sequence[Any]] = (ODD_NUMBERS, ODD_FLOATS, (*ODD_TEXTS, "\ud800"), DATATYPES, others)
    value = draw.choice(draw.choice(pools))
    for _ in range(draw.randrange(400) if draw.random() < 0.05 else 0):
        value = [value]
    return value


def change_json(draw: Random, value: Any) -> Any:
    """A copy of a JSON value in which one place is changed."""
    value = copy.deepcopy(value)
    owner, key = _place(draw, value)
    match draw.randrange(5):
        case _ if owner is None:
            return odd_value(draw)
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


def change_bytes(draw: Random, content: bytes) -> bytes:
    """A copy with one change: a bit, or a slice that is replaced, inserted, removed, repeated or cut off."""
    at = draw.randrange(len(content) + 1)
    end = min(at + draw.randrange(1, 17), len(content))
    before, changed, after = content[:at], content[at:end], content[end:]
    number = draw.choice(ODD_NUMBERS[:14]).to_bytes(16, "big", signed=True)
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: before + bytes(byte ^ 1 << draw.randrange(8) for byte in changed[:1]) + content[at + 1 :],
        lambda: before + draw.randbytes(end - at) + after,
        lambda: before + draw.choice(ODD_BYTES) + changed + after,
        lambda: before + after,
        lambda: before + changed * draw.choice((2, 3, 51)) + after,
        lambda: before,
        lambda: before + number[-draw.choice((1, 2, 4, 8)) :] + after,
    )
    return draw.choice(changes)()[:MAX_BYTES]
