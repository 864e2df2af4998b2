"""Forms with a file, as `/v1/audio/transcriptions` takes them. They are written anew, so that all read them alike."""

import asyncio
import re
import secrets
from collections.abc import Mapping

from aiohttp import BodyPartReader, MultipartReader
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import StreamReader

from trimtab_protocol.chat.engine_routes import EngineRoute, ForwardedRequest, ParsedRequest
from trimtab_protocol.chat.openai_requests import require_forwardable
from trimtab_protocol.errors import InvalidChat, not_supported

MAX_FIELDS = 64
MAX_FIELD_BYTES = 2**16
"""Of a field that is no file."""
_NAME = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)
_TYPE = re.compile(r"[\w.+-]{1,64}/[\w.+-]{1,64}", re.ASCII)
_UNSAFE = re.compile(r"[^\w.-]", re.ASCII)


async def parse_engine_form(route: EngineRoute, body: memoryview, headers: Mapping[str, str]) -> ParsedRequest:
    """Parse a form. Raises InvalidChat if it is none, or has fields that are not forwarded."""
    boundary, fields, written = secrets.token_hex(16), dict[str, bytes](), list[bytes]()
    try:
        async for part in MultipartReader(headers, _stream(body)):
            if not isinstance(part, BodyPartReader) or not _NAME.fullmatch(part.name or ""):
                raise InvalidChat(f"{route.path} takes a form of named fields")
            name, value = str(part.name), bytes(await part.read(decode=True))
            if len(fields) == MAX_FIELDS or (name in fields and not name.endswith("[]")):
                raise InvalidChat(f"the form repeats {name}, or has more than {MAX_FIELDS} fields", param=name)
            if part.filename is None and len(value) > MAX_FIELD_BYTES:
                raise InvalidChat(f"{name} has {len(value)} bytes; send at most {MAX_FIELD_BYTES}", param=name)
            fields[name] = value if part.filename is None else b""
            if name != "model":
                written += [_part_head(boundary, name, part), value, b"\r\n"]
    except (ValueError, AssertionError, LookupError, RuntimeError, HttpProcessingError) as error:
        if isinstance(error, InvalidChat):
            raise
        raise InvalidChat(f"{route.path} takes multipart/form-data: {error}") from error
    require_forwardable(fields)
    if fields.get("stream", b"").lower() in {b"true", b"1"}:
        raise not_supported("stream", "remove it: the response is sent as a whole")
    body_written = b"".join([*written, b"--%s--\r\n" % boundary.encode()])
    forwarded = ForwardedRequest(route, content_type=f"multipart/form-data; boundary={boundary}")
    return ParsedRequest(fields.get("model", b"").decode(errors="replace"), body_written, forwarded)


def _stream(body: memoryview) -> StreamReader:
    loop = asyncio.get_running_loop()
    stream = StreamReader(BaseProtocol(loop), 2**16, loop=loop)
    stream.feed_data(bytes(body))
    stream.feed_eof()
    return stream


def _part_head(boundary: str, name: str, part: BodyPartReader) -> bytes:
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"'
    if part.filename is not None:
        head += f'; filename="{_UNSAFE.sub("_", part.filename)[-128:] or "file"}"'
        content_type = part.headers.get("Content-Type", "")
        head += f"\r\nContent-Type: {content_type}" if _TYPE.fullmatch(content_type) else ""
    return f"{head}\r\n\r\n".encode()
