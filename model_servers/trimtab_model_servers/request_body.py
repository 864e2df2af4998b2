"""Request bodies read into memory that numbers can be read from in place."""

import numpy as np
from aiohttp import web

from trimtab_model_servers.errors import RefusalError

_ALIGNMENT_BYTES = 64


async def read_body(request: web.BaseRequest, header_bytes: int, max_bytes: int) -> memoryview:
    """Read a body of bounded size, placed so that what follows its first `header_bytes` starts on a cache line.

    The numbers of a tensor right behind the JSON header can then be computed with where they lie.

    Raises:
        RefusalError: 413 above `max_bytes`; 400 where the caller went away before the end.
    """
    length = request.content_length
    if length is None:
        return await _read_unknown_length(request, max_bytes)
    if length > max_bytes:
        raise _too_large(length, max_bytes)
    buffer = np.empty(length + _ALIGNMENT_BYTES, np.uint8)
    offset = -(buffer.ctypes.data + header_bytes) % _ALIGNMENT_BYTES
    body = buffer.data[offset : offset + length]
    position = 0
    while chunk := await request.content.readany():
        body[position : position + len(chunk)] = chunk
        position += len(chunk)
    if position != length:
        raise RefusalError(400, f"the body ended after {position} of its {length} bytes")
    return body


async def _read_unknown_length(request: web.BaseRequest, max_bytes: int) -> memoryview:
    body = bytearray()
    while chunk := await request.content.readany():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(len(body), max_bytes)
    return memoryview(body)


def _too_large(length: int, max_bytes: int) -> RefusalError:
    return RefusalError(413, f"a body of {length} bytes is too large; send at most {max_bytes} bytes")
