"""Generated requests: HTTP/1.1 as a whole, its bodies, gRPC messages, and sequences of HTTP/2 frames."""

import json
from random import Random
from typing import Any, NamedTuple

import numpy as np

from benchmarks.fuzz.mutations import (
    DATATYPES,
    ODD_NUMBERS,
    ODD_TEXTS,
    mutate_bytes,
    mutate_json,
    several,
)
from benchmarks.hostile import frames
from benchmarks.hostile.caller import INFER_PATH, LIVE_PATH
from benchmarks.hostile.door import INFER, MODEL
from benchmarks.hostile.wire import head
from trimtab_protocol.grpc_messages import request_class

HEADER_LENGTH = "Inference-Header-Content-Length"
TRACE_PARENT = f"traceparent: 00-{'a' * 32}-{'b' * 16}-01"
LINES = [TRACE_PARENT, "x-request-id: 1", "Content-Type: application/json", "Expect: 100-continue", "TE: trailers"]
LINES += ["Transfer-Encoding: chunked", "Connection: close", "Content-Encoding: gzip"]

CALL_LINES = [TRACE_PARENT, "x-request-id: 1", "grpc-encoding: gzip", "grpc-encoding: \xe9", "x-trimtab-client: a"]
CALL_LINES += [f"grpc-timeout: {text}" for text in ("1S", "1n", "99999999H", "-1S", "1", "\xb2S", "")]
CALL_LINES += ["x-request-id: \xff\xfe", "x-request-id: " + "a" * 3000, "traceparent: 00-1", "Content-Encoding: gzip"]


class Body(NamedTuple):
    """A REST body and what its header says of its own length, if anything."""

    content: bytes
    header_length: str | None


def a_body(draw: Random) -> Body:
    """A JSON or binary request, changed as structure or as bytes."""
    tensor, raw = _a_tensor(draw)
    request = {"id": "1", "inputs": [tensor], "parameters": {"timeout": 2_000_000}, "outputs": [{"name": "y"}]}
    header = json.dumps(several(draw, request, mutate_json)).encode()
    length: str | None = str(len(header)) if raw else None
    if draw.random() < 0.1:
        length = str(draw.choice((*ODD_NUMBERS, *ODD_TEXTS[:3], -5, len(header) // 2, "9" * 5000)))
    content = header + raw
    return Body(mutate_bytes(draw, content) if draw.random() < 0.3 else content, length)


def _a_tensor(draw: Random) -> tuple[dict[str, Any], bytes]:
    """A right tensor, its values in it or behind it; a third of them of datatypes that the pipeline does not take."""
    rows, width = draw.randint(1, 3), draw.randint(1, 4)
    tensor: dict[str, Any] = {"name": "x", "shape": [rows, width], "datatype": "FP32"}
    match draw.randrange(9):
        case 0:
            tensor |= {"datatype": "BYTES", "data": [draw.choice(ODD_TEXTS)] * rows * width}
        case 1:
            raw = b"".join(len(text).to_bytes(4, "little") + text for text in [b"text"] * rows * width)
            return {**tensor, "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}, raw
        case 2:
            tensor |= {"datatype": draw.choice(DATATYPES), "data": [draw.choice((0, 1))] * rows * width}
        case 3 | 4 | 5:
            tensor["data"] = [float(draw.randrange(1000))] * rows * width
        case _:
            raw = np.full((rows, width), draw.randrange(1000), np.float32).tobytes()
            return {**tensor, "parameters": {"binary_data_size": len(raw)}}, raw
    return tensor, b""


def an_http_request(draw: Random) -> bytes:
    """A whole POST with right framing and odd content."""
    body = a_body(draw)
    lines = [f"Content-Length: {len(body.content)}"]
    if body.header_length is not None and body.header_length.isprintable() and body.header_length.isascii():
        lines.append(f"{HEADER_LENGTH}: {body.header_length}")
    path = (
        INFER
        if draw.random() < 0.9
        else draw.choice(("/v2/models/x/infer", INFER + "/", "/v2/models/echo/versions/2/infer"))
    )
    return head("POST", path, *lines) + body.content


def a_broken_http_request(draw: Random) -> bytes:
    """A request whose head or framing is changed too."""
    body = a_body(draw)
    lines = [f"Content-Length: {len(body.content)}", *draw.sample(LINES, draw.randrange(3))]
    whole = head(draw.choice(("POST", "GET", "PUT", "HEAD")), draw.choice((INFER, "/v2", "/v2/health/live")), *lines)
    return several(draw, whole, mutate_bytes) + body.content  # type: ignore[no-any-return]


def a_message(draw: Random) -> bytes:
    """A ModelInferRequest, some of its fields otherwise, or its bytes changed."""
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
    return mutate_bytes(draw, serialized) if draw.random() < 0.4 else serialized


def _change_field(draw: Random, request: Any, tensor: Any) -> None:
    text = draw.choice([text for text in ODD_TEXTS if text != "\ud800"])
    number = draw.choice([number for number in ODD_NUMBERS if number < 2**63])
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
            field, value = draw.choice(
                (("int64_param", number), ("string_param", text), ("double_param", float("nan")))
            )
            setattr(request.parameters[draw.choice(("timeout", "priority", text))], field, value)
        case 7:
            request.outputs.add(name=draw.choice(("y", text)))
        case 8:
            request.inputs.add().CopyFrom(tensor)
        case _:
            tensor.contents.bytes_contents.append(draw.randbytes(draw.randrange(20)))


def a_prefixed_message(draw: Random) -> bytes:
    """A framed message; now and then its prefix lies."""
    body = a_message(draw)
    if draw.random() < 0.9:
        return frames.message(body)
    length = draw.choice((0, len(body) + 1, max(len(body) - 1, 0), 2**32 - 1, 2**20))
    return frames.message(body, flag=draw.choice((0, 1, 2, 255)), length=length)


def a_call_as_http1(draw: Random) -> bytes:
    """A call as Envoy passes it on: a POST with a framed message, some of its fields odd; its framing is right."""
    body = a_prefixed_message(draw)
    path = (
        INFER_PATH if draw.random() < 0.9 else draw.choice((LIVE_PATH, LIVE_PATH[:-1], b"/grpc.health.v1.Health/Check"))
    )
    lines = ["te: trailers", f"content-type: application/grpc{draw.choice(('', '', '', '+proto', ';a=b', '-web'))}"]
    lines += draw.sample(CALL_LINES, draw.randrange(3))
    whole = draw.random() < 0.8
    framing = f"Content-Length: {len(body)}" if whole else "Transfer-Encoding: chunked"
    return head("POST", path.decode(), *lines, framing) + (body if whole else _in_chunks(draw, body))


def _in_chunks(draw: Random, body: bytes) -> bytes:
    cut = draw.randrange(len(body) + 1)
    pieces = [piece for piece in (body[:cut], body[cut:]) if piece]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
