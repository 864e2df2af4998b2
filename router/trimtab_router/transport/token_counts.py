"""What a chat would take, as replicas tell it that compute nothing."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from trimtab_pipelines.error_codes import ErrorCode
from trimtab_pipelines.graph import REQUEST, split_reference
from trimtab_pipelines.stages import EMBEDDINGS_INPUT, IMAGES_INPUT, Stage
from trimtab_protocol.chat.embedding_refs import CountedChat, CountedImages, listed
from trimtab_protocol.chat.internal_wire import Usage, texts
from trimtab_protocol.tensors import Array
from trimtab_router.execution.executor import PipelineExecutor
from trimtab_router.refusal import Refusal, invalid
from trimtab_router.request import image_fanout
from trimtab_router.transport.http_transport import HttpTransport
from trimtab_router.transport.stream_client import CALLERS_FAULT, message_in

Told = TypeVar("Told")


async def fetch_token_counts(
    course: PipelineExecutor, carriers: Mapping[str, HttpTransport], inputs: Mapping[str, Array]
) -> Usage:
    """Ask what the first row of a request would take; where images are encoded apart, their encoders first.

    Raises:
        Refusal: the chat cannot be served as it is, or nobody can tell.
    """
    writer = course.desks.get(course.teller or "")
    if writer is None:
        raise _nobody()
    own = _given(writer.stage, inputs)
    encoders = [desk.stage for name, desk in course.desks.items() if desk.stage.encodes and name not in course.idle]
    for encoder in encoders:
        shown = _given(encoder, inputs)
        if IMAGES_INPUT in shown:
            own[EMBEDDINGS_INPUT] = await _asked(course, carriers, encoder, image_fanout.fan_out_images(shown), _blank)
    return await _asked(course, carriers, writer.stage, own, _usage)


async def _asked(
    course: PipelineExecutor,
    carriers: Mapping[str, HttpTransport],
    stage: Stage,
    inputs: Mapping[str, Array],
    told: Callable[[bytes], Told],
) -> Told:
    slot = next((slot for slot in course.desks[stage.name].slots if slot.ready_variants), None)
    if slot is None or stage.name not in carriers:
        raise _nobody()
    current = course.desks[stage.name].variant
    variant = current if current in slot.ready_variants else min(slot.ready_variants)
    if carriers[stage.name].replicas[slot.name].chats:
        message = f"stage {stage.name}: variant {variant} has an engine of its own, which does not count beforehand"
        raise Refusal(ErrorCode.UNIMPLEMENTED, "CountsNothing", message, stage=stage.name)
    read = {name: array for name, array in inputs.items() if name != stage.excluded_input(variant)}
    status, body = await carriers[stage.name].count(slot.name, variant, read)
    if status in CALLERS_FAULT:
        raise invalid(f"stage {stage.name}: {message_in(body)}")
    try:
        return told(body if status == 200 else b"")
    except ValueError as error:
        message = f"stage {stage.name}: its replica does not count; try again later"
        raise Refusal(
            ErrorCode.UNAVAILABLE, "NotCounted", message, stage=stage.name, retry_after_seconds=1.0
        ) from error


def _given(stage: Stage, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """What a stage reads of the first row of a request."""
    reads = [(read.name, *split_reference(read.source)) for read in stage.inputs]
    return {name: inputs[tensor][:1] for name, owner, tensor in reads if owner == REQUEST and tensor in inputs}


def _blank(told: bytes) -> Array:
    """Images of as many rows as an encoder tells, which show nothing."""
    return texts([listed(CountedImages.model_validate_json(told).blanks())])


def _usage(told: bytes) -> Usage:
    counted = CountedChat.model_validate_json(told)
    return Usage(prompt=counted.prompt_tokens, image=sum(counted.image_tokens), text=counted.text_tokens)


def _nobody() -> Refusal:
    return Refusal(ErrorCode.UNAVAILABLE, "NoReplica", "no replica is ready to count", retry_after_seconds=1.0)
