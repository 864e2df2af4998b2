"""An answer in JSON."""

import json
from collections.abc import Mapping

from aiohttp import web


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A JSON answer."""
    body = json.dumps(content).encode()
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
