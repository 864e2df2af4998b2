"""Model server process that reads large batches without storing them, and returns y = 1."""

import asyncio
import json
import re
import sys

import numpy as np

from trimtab_protocol import InferResponse, Tensor, rest

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_HEADER = re.compile(rb"inference-header-content-length: (\d+)", re.IGNORECASE)
_PIECE_BYTES = 2**18


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request after the other."""
    while not reader.at_eof():
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            break
        length = int(_LENGTH.findall(head)[-1])
        header = await reader.readexactly(int(found[1])) if (found := _HEADER.search(head)) else b""
        left = length - len(header)
        while left > 0:
            left -= len(await reader.read(min(left, _PIECE_BYTES)))
        writer.write(answer(header))
        await writer.drain()
    writer.close()


def answer(header: bytes) -> bytes:
    """A readiness probe's, or a batch's."""
    if not header:
        return b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    asked = json.loads(header)
    outputs = (Tensor.of("y", np.ones((asked["inputs"][0]["shape"][0], 4), np.float32)),)
    buffers, size = rest.encode_response(InferResponse("m", outputs, id=asked["id"]), frozenset({"y"}))
    body = b"".join(bytes(buffer) for buffer in buffers)
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{rest.HEADER_LENGTH}: {size}\r\n\r\n".encode() + body


async def main() -> None:
    """Print the port, serve until the end."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
