"""Requests to inference engines with an OpenAI API, such as vLLM or SGLang."""

from collections.abc import Mapping, Sequence

from trimtab_protocol import Tensor
from trimtab_protocol.chat.internal_wire import IMAGES
from trimtab_protocol.chat.openai_backend import COMPLETIONS, ChunkParser, completion_request
from trimtab_protocol.rest import JSON_CONTENT_TYPE
from trimtab_router.transport.stream_client import StreamRequest

BACKEND_IDLE_SECONDS = 2.0
"""Idle time before a connection is closed.

The engines' servers close one after five seconds, and would lose a request sent at that moment.
"""
_RETRY_LATER = frozenset({429, 503})
"""Statuses that ask for a later retry. 404 means that the engine does not have the model, so a retry cannot help."""


def stream_request_for(
    model: str, name: str, inputs: Sequence[Sequence[Tensor]], headers: Mapping[str, str]
) -> StreamRequest:
    """Request for one row. Raises ProtocolError if it is not a chat.

    Args:
        model: name of the model at the engine.
        name: unique name of the row: engines use the request id as theirs, which must not run twice.
        inputs: a single tensor of one row for each input.
        headers: forwarded to the engine.
    """
    row = {tensor.name: tensor.array for (tensor,) in inputs}
    request_id = "-".join(filter(None, (headers.get("x-request-id"), name)))
    return StreamRequest(
        COMPLETIONS,
        completion_request(model, row),
        {"Content-Type": JSON_CONTENT_TYPE, **headers, "x-request-id": request_id},
        ChunkParser(images=IMAGES in row).read,
        _RETRY_LATER,
    )
