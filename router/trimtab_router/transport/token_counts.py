"""Token counts of a chat, reported by replicas without generating."""

import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from trimtab_pipelines.graph import REQUEST, split_reference
from trimtab_pipelines.stages import EMBEDDINGS_INPUT, IMAGES_INPUT, Stage
from trimtab_protocol.chat.embedding_refs import ChatTokenCounts, EmbeddingCounts, dump_refs
from trimtab_protocol.chat.internal_wire import Usage, bytes_tensor
from trimtab_protocol.sanitize import printable
from trimtab_protocol.tensors import Array
from trimtab_router.execution import chat_images
from trimtab_router.execution.executor import PipelineExecutor
from trimtab_router.refusal import Refusal, invalid
from trimtab_router.transport.http_transport import HttpTransport
from trimtab_router.transport.stream_client import CLIENT_ERROR_STATUSES, LACKS_PATH_STATUSES, error_message

Counts = TypeVar("Counts")
_COUNTS_NOTHING = LACKS_PATH_STATUSES | {403}
"""403: vLLM counts the tokens of images only with --enable-scale-out, which its message names."""
_ENGINE_COUNT = re.compile(rb'"count"\s*:\s*([0-9]{1,9})\b')
_ENGINE_TOKENS = re.compile(rb'"token_ids"\s*:\s*\[([0-9,\s]+)\]')


async def fetch_token_counts(
    executor: PipelineExecutor, transports: Mapping[str, HttpTransport], inputs: Mapping[str, Array]
) -> Usage:
    """Token counts of a request's first row. Raises Refusal: invalid chat, or no replica can count its tokens."""
    generator = executor.schedulers.get(executor.streaming_stage or "")
    if generator is None:
        raise _no_replica()
    inputs_of_stage = _first_row(generator.stage, inputs)
    encoders = [
        scheduler.stage
        for name, scheduler in executor.schedulers.items()
        if scheduler.stage.encodes and name not in executor.idle_stages
    ]
    for encoder in encoders:
        images = _first_row(encoder, inputs)
        if IMAGES_INPUT in images:
            inputs_of_stage[EMBEDDINGS_INPUT] = await _fetch(
                executor, transports, encoder, chat_images.fan_out_images(images), _blank_images
            )
    return await _fetch(executor, transports, generator.stage, inputs_of_stage, _usage)


async def _fetch(
    executor: PipelineExecutor,
    carriers: Mapping[str, HttpTransport],
    stage: Stage,
    inputs: Mapping[str, Array],
    parse: Callable[[bytes], Counts],
) -> Counts:
    replica = next((replica for replica in executor.schedulers[stage.name].replicas if replica.ready_variants), None)
    if replica is None or stage.name not in carriers:
        raise _no_replica()
    current = executor.schedulers[stage.name].variant
    variant = current if current in replica.ready_variants else min(replica.ready_variants)
    client = carriers[stage.name].replicas[replica.name]
    if client.chats and not client.counts(images=IMAGES_INPUT in inputs):
        which = "the tokens of images" if client.counts(images=False) else "tokens"
        message = f"stage {stage.name}: variant {variant} runs on an external engine, which does not count {which}"
        raise Refusal("CountsNothing", f"{message} in advance", stage=stage.name)
    read = {name: array for name, array in inputs.items() if name != stage.excluded_input(variant)}
    status, body = await carriers[stage.name].count_tokens(replica.name, variant, read)
    if status in CLIENT_ERROR_STATUSES:
        raise invalid(f"stage {stage.name}: {error_message(body)}")
    if client.chats and status in _COUNTS_NOTHING:
        message = f"stage {stage.name}: its engine counts no tokens in advance: {error_message(body) or status}"
        raise Refusal("CountsNothing", printable(message), stage=stage.name)
    try:
        return parse(body if status == 200 else b"")
    except ValueError as error:
        message = f"stage {stage.name}: its replica did not count the tokens; try again later"
        raise Refusal("NotCounted", message, stage=stage.name) from error


def _first_row(stage: Stage, inputs: Mapping[str, Array]) -> dict[str, Array]:
    reads = [(read.name, *split_reference(read.source)) for read in stage.inputs]
    return {name: inputs[tensor][:1] for name, owner, tensor in reads if owner == REQUEST and tensor in inputs}


def _blank_images(body: bytes) -> Array:
    return bytes_tensor([dump_refs(EmbeddingCounts.model_validate_json(body).blanks())])


def _usage(body: bytes) -> Usage:
    """Read the count of a replica, or of an engine, whose tokens may be cut off. Raises ValueError without one."""
    if found := _ENGINE_COUNT.search(body):
        return Usage(prompt=int(found[1]), text=int(found[1]))
    if found := _ENGINE_TOKENS.search(body):
        return Usage(prompt=found[1].count(b",") + 1)
    counted = ChatTokenCounts.model_validate_json(body)
    return Usage(prompt=counted.prompt_tokens, image=sum(counted.image_tokens), text=counted.text_tokens)


def _no_replica() -> Refusal:
    return Refusal("NoReplica", "no replica is ready to count tokens")
