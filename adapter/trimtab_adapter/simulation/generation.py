"""Chats in simulated time: what they show, and the rows that a replica writes beside each other."""

import json
from collections.abc import Mapping
from functools import partial

import numpy as np

from trimtab_adapter.simulation.replica import SimulatedReplica
from trimtab_adapter.simulation.transport import Ended, SimulatedTransport, rows_of
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import EMBEDDINGS_INPUT, GENERATION_OUTPUTS, IMAGES_INPUT, MESSAGES_INPUT
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk, Usage, texts
from trimtab_protocol.tensors import Array
from trimtab_router.scheduling.batch_outcomes import Cancelled, Completed, Ending
from trimtab_router.scheduling.interfaces import Wrote
from trimtab_router.scheduling.replica_slots import Batch

TOKEN_BYTES = 4
"""Of text, of each token."""


def usual_images(spec: InferencePipelineSpec) -> int:
    """How many images a chat shows where nothing else is said: what the stage that encodes expects, else one."""
    expected = (round(stage.outputs[0].expected_rows) for stage in spec.stages if stage.encodes)
    return next(expected, 1)


def placeholder_images(rows: int, images: int) -> Array:
    """The images of chats that show so many each; only the shape means anything."""
    return np.zeros((rows, images), dtype=np.int8)


def placeholder_messages(rows: int, tokens: int) -> Array:
    """The messages of chats of so many tokens each; only how long they are means anything."""
    return texts([b" " * (TOKEN_BYTES * tokens)] * rows)


def text_tokens_in(inputs: Mapping[str, Array]) -> int:
    """How many tokens the words of a row come to; 0 where nothing says so."""
    messages = inputs.get(MESSAGES_INPUT)
    return len(messages[0]) // TOKEN_BYTES if messages is not None and messages.dtype.kind == "O" else 0


def images_in(inputs: Mapping[str, Array]) -> int:
    """How many images the chat of a row shows, who writes it told by what it reads."""
    if IMAGES_INPUT in inputs:
        return int(inputs[IMAGES_INPUT].shape[1])
    return len(json.loads(inputs[EMBEDDINGS_INPUT][0])) if EMBEDDINGS_INPUT in inputs else 0


class SimulatedGenerationTransport(SimulatedTransport):
    """The replicas of a stage that writes.

    What a row takes until its first piece, and in all, is drawn when it begins: for as many rows as its replica then
    writes, and for the images of its chat.
    """

    def write(self, parcel: Batch, wrote: Wrote, ended: Ended) -> None:
        """Draw when a row begins to be told and when it is whole."""
        replica = self._by_slot[parcel.slot]
        replica.held.append((parcel, ended))
        self._machine.busy += len(replica.held) == 1
        inputs = parcel.batch[0].work.inputs
        drawn = self._draws.draw_chat(*parcel.key, len(replica.held), images_in(inputs), text_tokens_in(inputs))
        first, whole, tokens = drawn.first_seconds, drawn.whole_seconds, drawn.tokens
        slowed = 1.0 + self._machine.contention * (self._machine.busy - 1)
        now, rest = self._clock.now, max(round(tokens) - 1, 1)
        self._clock.at(now + slowed * first, partial(self._tell, replica, parcel, wrote, Chunk("", 1)))
        more = partial(self._tell, replica, parcel, wrote, Chunk("", rest))
        self._clock.at(now + slowed * whole, more)
        self._clock.at(now + slowed * whole, partial(self._written, replica, parcel, wrote, drawn.usage))

    def abandon(self, parcel: Batch) -> None:
        """Write no more of a row; with a replica that died it ends by itself."""
        replica = self._by_slot.get(parcel.slot)
        if replica is not None:
            self._end(replica, parcel, Cancelled())

    def _tell(self, replica: SimulatedReplica, parcel: Batch, wrote: Wrote, piece: Chunk | LastChunk) -> None:
        if any(held is parcel for held, _ in replica.held):
            wrote(parcel, piece)

    def _written(self, replica: SimulatedReplica, parcel: Batch, wrote: Wrote, usage: Usage) -> None:
        self._tell(replica, parcel, wrote, LastChunk("", "stop", usage))
        given = {name: rows_of(1) for name, *_ in GENERATION_OUTPUTS}
        self._end(replica, parcel, Completed((given,), parcel.point.name))

    def _end(self, replica: SimulatedReplica, parcel: Batch, ending: Ending) -> None:
        """End a row that the replica still has; one that died with it has ended already."""
        found = next((each for each in replica.held if each[0] is parcel), None)
        if found is None:
            return
        replica.held.remove(found)
        self._machine.busy -= not replica.held
        found[1](parcel, ending)
        if replica.state == "draining" and not replica.held:
            self._on_idle(replica)
