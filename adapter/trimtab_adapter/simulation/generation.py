"""Simulated chats: their images and tokens, and the transport of a generation stage."""

import json
from collections.abc import Mapping
from functools import partial

import numpy as np

from trimtab_adapter.simulation.transport import SimulatedReplica, SimulatedTransport, rows_of
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import EMBEDDINGS_INPUT, GENERATION_OUTPUTS, IMAGES_INPUT, MESSAGES_INPUT
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk, Usage, bytes_tensor
from trimtab_protocol.tensors import Array
from trimtab_router.scheduling.interfaces import OnChunk, OnEnd
from trimtab_router.scheduling.replica_slots import Batch, BatchOutcome, Cancelled, Completed

TOKEN_BYTES = 4
"""Bytes of text per token."""


def typical_images(spec: InferencePipelineSpec) -> int:
    """Images per chat unless the scenario says otherwise: the encoder's expected rows, else one."""
    expected = (round(stage.outputs[0].expected_rows) for stage in spec.stages if stage.encodes)
    return next(expected, 1)


def placeholder_images(rows: int, images: int) -> Array:
    """Images of chats; only the shape has a meaning."""
    return np.zeros((rows, images), dtype=np.int8)


def placeholder_messages(rows: int, tokens: int) -> Array:
    """Messages of chats with this many tokens; only their length has a meaning."""
    return bytes_tensor([b" " * (TOKEN_BYTES * tokens)] * rows)


def text_tokens_in(inputs: Mapping[str, Array]) -> int:
    """Text tokens of a row; 0 if unknown."""
    messages = inputs.get(MESSAGES_INPUT)
    return len(messages[0]) // TOKEN_BYTES if messages is not None and messages.dtype.kind == "O" else 0


def images_in(inputs: Mapping[str, Array]) -> int:
    if IMAGES_INPUT in inputs:
        return int(inputs[IMAGES_INPUT].shape[1])
    return len(json.loads(inputs[EMBEDDINGS_INPUT][0])) if EMBEDDINGS_INPUT in inputs else 0


class SimulatedGenerationTransport(SimulatedTransport):
    """The replicas of a generation stage; a row's times are sampled when it starts, for its images and company."""

    def stream(self, batch: Batch, on_chunk: OnChunk, on_end: OnEnd) -> None:
        replica = self._replicas_by_slot[batch.replica]
        replica.in_flight.append((batch, on_end))
        self._machine.busy += len(replica.in_flight) == 1
        inputs = batch.row_slices[0].request.inputs
        sample = self._draws.draw_chat(*batch.key, len(replica.in_flight), images_in(inputs), text_tokens_in(inputs))
        first, total, tokens = sample.first_seconds, sample.whole_seconds, sample.tokens
        slowed = 1.0 + self._machine.contention * (self._machine.busy - 1)
        now, rest = self._clock.now, max(round(tokens) - 1, 1)
        self._clock.call_at(now + slowed * first, partial(self._emit, replica, batch, on_chunk, Chunk("", 1)))
        more = partial(self._emit, replica, batch, on_chunk, Chunk("", rest))
        self._clock.call_at(now + slowed * total, more)
        self._clock.call_at(now + slowed * total, partial(self._complete, replica, batch, on_chunk, sample.usage))

    def cancel(self, batch: Batch) -> None:
        """Stop a generation; one whose replica died has ended already."""
        replica = self._replicas_by_slot.get(batch.replica)
        if replica is not None:
            self._end(replica, batch, Cancelled())

    def _emit(self, replica: SimulatedReplica, batch: Batch, on_chunk: OnChunk, chunk: Chunk | LastChunk) -> None:
        if any(running is batch for running, _ in replica.in_flight):
            on_chunk(batch, chunk)

    def _complete(self, replica: SimulatedReplica, batch: Batch, on_chunk: OnChunk, usage: Usage) -> None:
        self._emit(replica, batch, on_chunk, LastChunk("", "stop", usage))
        outputs = {name: rows_of(1) for name, *_ in GENERATION_OUTPUTS}
        self._end(replica, batch, Completed((outputs,), batch.point.name))

    def _end(self, replica: SimulatedReplica, batch: Batch, outcome: BatchOutcome) -> None:
        """End a row that the replica still has; one that died with the replica has ended already."""
        entry = next((entry for entry in replica.in_flight if entry[0] is batch), None)
        if entry is None:
            return
        replica.in_flight.remove(entry)
        self._machine.busy -= not replica.in_flight
        entry[1](batch, outcome)
        if replica.state == "draining" and not replica.in_flight:
            self._on_idle(replica)
