"""The decoders in this process: whatever they are given, nothing but ProtocolError may come out."""

import asyncio
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from benchmarks.fuzz.generated import Body
from benchmarks.hostile.door import MODEL, Door
from trimtab_protocol import ProtocolError, grpc_messages, rest

OK, REFUSED = "ok", "refused"


async def bodies(_: Door, generated: Sequence[Body]) -> list[str]:
    """Read REST bodies."""
    await asyncio.sleep(0)
    return [decode_body(body) for body in generated]


async def messages(_: Door, generated: Sequence[bytes]) -> list[str]:
    """Read gRPC messages."""
    await asyncio.sleep(0)
    return [decode_message(message) for message in generated]


def decode_body(body: Body) -> str:
    """Read a REST body; return `ok`, `refused`, or the name of what escaped."""
    return _outcome(lambda: rest.decode_request(MODEL, body.content, body.header_length))


def decode_message(sent: bytes) -> str:
    """Read a gRPC message."""
    try:
        message = grpc_messages.request_class("ModelInfer").FromString(sent)
    except DecodeError:
        return REFUSED
    return _outcome(lambda: grpc_messages.request_from_message(message))


def _outcome(decode: Callable[[], object]) -> str:
    try:
        decode()
    except ProtocolError:
        return REFUSED
    except Exception as error:  # noqa: BLE001 - what escapes is what we look for
        return f"{type(error).__name__}: {error}"[:100]
    return OK
