"""A row for an engine that speaks OpenAI's API itself, such as vLLM or SGLang: how it is asked, and heard. Pure."""

from collections.abc import Mapping, Sequence

from trimtab_protocol import Tensor
from trimtab_protocol.chat.internal_wire import IMAGES
from trimtab_protocol.chat.openai_backend import COMPLETIONS, Chunks, completion_request
from trimtab_protocol.rest import JSON_CONTENT_TYPE
from trimtab_router.transport.stream_client import StreamRequest

LET_IDLE_SECONDS = 2.0
"""Their servers close a connection after five seconds without a request; one that crosses with it would be lost."""
_NOT_NOW = frozenset({429, 503})
"""By these they ask for another time. By 404 they say that they have no such model, which no waiting mends."""


def stream_request_for(
    model: str, name: str, inputs: Sequence[Sequence[Tensor]], headers: Mapping[str, str]
) -> StreamRequest:
    """One row as its engine reads it; raises ProtocolError where it is no chat.

    Args:
        model: what the engine calls it.
        name: of this row alone: engines take the request's id for their own, which must not run twice.
        inputs: each of a single piece, of one row.
        headers: to be passed on.
    """
    row = {tensor.name: tensor.array for (tensor,) in inputs}
    told = "-".join(filter(None, (headers.get("x-request-id"), name)))
    return StreamRequest(
        COMPLETIONS,
        completion_request(model, row),
        {"Content-Type": JSON_CONTENT_TYPE, **headers, "x-request-id": told},
        Chunks(images=IMAGES in row).read,
        _NOT_NOW,
    )
