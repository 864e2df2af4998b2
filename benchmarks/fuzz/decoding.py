"""The decoders in this process: whatever they are given, nothing but ProtocolError may come out."""

from collections.abc import Callable
from random import Random

from google.protobuf.message import DecodeError

from benchmarks.fuzz.generated import a_body, a_message
from benchmarks.hostile.door import MODEL
from trimtab_protocol import ProtocolError, grpc_messages, rest


def decode_body(draw: Random) -> str:
    """Read a generated REST body; return `ok`, `refused`, or the name of what escaped."""
    body = a_body(draw)
    return _outcome(lambda: rest.decode_request(MODEL, body.content, body.header_length))


def decode_message(draw: Random) -> str:
    """Read a generated gRPC message."""
    sent = a_message(draw)
    try:
        message = grpc_messages.request_class("ModelInfer").FromString(sent)
    except DecodeError:
        return "refused"
    return _outcome(lambda: grpc_messages.request_from_message(message))


def _outcome(decode: Callable[[], object]) -> str:
    try:
        decode()
    except ProtocolError:
        return "refused"
    except Exception as error:  # noqa: BLE001 - what escapes is what we look for
        return f"{type(error).__name__}: {error}"[:100]
    return "ok"
