"""`PrefixRouting`: sends a chat to the replica that holds its leading messages in its prefix cache.

What a replica holds is known from the chats sent to it. It is chosen unless its pending work exceeds that of another
replica by more than the prefill that it saves, both in tokens, and unless it has far more than its share of the load.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from trimtab_pipelines.stages import EMBEDDINGS_INPUT, IMAGES_INPUT, MESSAGES_INPUT
from trimtab_router.scheduling.interfaces import Feature
from trimtab_router.scheduling.replica_slots import Batch, ReplicaSlots
from trimtab_router.scheduling.stage_request import StageRequest

BLOCK_BYTES = 256
"""Messages are compared in blocks of their JSON, each together with all before it."""
MAX_BLOCKS = 256
"""Compared blocks of one chat."""
MAX_HELD_BLOCKS = 4096
"""Of one replica; the least recently used are forgotten."""
BYTES_PER_TOKEN = 4.0
"""Until the lengths of prompts are known."""
MAX_SHARE = 1.25
"""Largest load of a replica that is chosen for its prefixes, in means of all replicas, plus `FEW` requests: of those in
flight, and of the latest `RECENT`. Conversations would never return to a replica that was away for a while.
"""
FEW, RECENT = 1, 64
_IMAGE, _IMAGE_END_BYTES = b'"image"}', 64


class PrefixRouting(Feature):
    """Prefixes of the chats that one stage sent to its replicas."""

    def __init__(self) -> None:
        self._blocks: dict[StageRequest, Sequence[int]] = {}
        self._recent: deque[ReplicaSlots] = deque(maxlen=RECENT)
        """Replicas of the latest requests."""

    def preferred(
        self, candidates: Sequence[ReplicaSlots], least_loaded: ReplicaSlots, request: StageRequest
    ) -> ReplicaSlots:
        """Return the replica with the least work for a chat; `least_loaded` if none of its prefixes is held."""
        ready = [replica for replica in candidates if replica.ready_variants == least_loaded.ready_variants]
        blocks = self._blocks_of(request) if len(ready) > 1 else ()
        if not blocks:
            return least_loaded
        tokens = _block_tokens(request)
        most_inflight = MAX_SHARE * sum(replica.inflight for replica in ready) / len(ready) + FEW
        most_recent, recent = MAX_SHARE * len(self._recent) / len(ready) + FEW, Counter(self._recent)
        waits = least_loaded.has_engine_queue

        def work(replica: ReplicaSlots) -> float:
            return replica.pending_tokens + replica.foreign_requests - tokens * _held(replica, blocks)

        fitting = (
            replica
            for replica in ready
            if replica.free
            and replica.inflight <= most_inflight
            and recent[replica] <= most_recent
            and replica.has_engine_queue <= waits
        )
        return min((least_loaded, *fitting), key=work)

    def on_dispatch(self, batch: Batch) -> None:
        request, replica = batch.row_slices[0].request, batch.replica
        self._recent.append(replica)
        blocks, held = self._blocks_of(request), replica.held_prefixes
        if blocks and batch in replica.prefilling:
            saved = _block_tokens(request) * _held(replica, blocks)
            replica.prefilling[batch] = max(replica.prefilling[batch] - saved, 1.0)
        for block in reversed(blocks):  # leading blocks last, since others are of no use without them
            held.pop(block, None)
            held[block] = None
        while len(held) > MAX_HELD_BLOCKS:
            del held[next(iter(held))]

    def _blocks_of(self, request: StageRequest) -> Sequence[int]:
        if request not in self._blocks:
            self._blocks.clear()  # only those of the latest are kept, from its choice to its dispatch
            self._blocks[request] = self._computed(request)
        return self._blocks[request]

    def _computed(self, request: StageRequest) -> Sequence[int]:
        """Return the hash of each leading part of a chat; none without a tenant, whose chats share no cache."""
        messages = request.inputs.get(MESSAGES_INPUT)
        if not request.tenant or messages is None or messages.dtype.kind != "O":
            return ()
        files, references = request.inputs.get(IMAGES_INPUT), request.inputs.get(EMBEDDINGS_INPUT)
        ends = (
            [] if files is None or files.dtype.kind != "O" else [bytes(file[-_IMAGE_END_BYTES:]) for file in files[0]]
        )
        # References are names of embeddings of this chat alone: it shares no prefix.
        owner = request.tenant, request.options.task, None if references is None else bytes(references[0])
        return list(_hashes(hash(owner), bytes(messages[0][: MAX_BLOCKS * BLOCK_BYTES]), ends))


def _hashes(before: int, messages: bytes, image_ends: Sequence[bytes]) -> Iterator[int]:
    """Hash each block with all before it; an image is known by the end of its file, which its compression decides."""
    images = 0
    for end in range(BLOCK_BYTES, len(messages) + 1, BLOCK_BYTES):
        start = end - BLOCK_BYTES
        shown = images + messages.count(_IMAGE, max(start - len(_IMAGE) + 1, 0), end)
        before = hash((before, messages[start:end], *image_ends[images:shown]))
        images = shown
        yield before


def _block_tokens(request: StageRequest) -> float:
    tokens = max(request.prompt_tokens, default=0.0)
    return tokens * BLOCK_BYTES / len(request.inputs[MESSAGES_INPUT][0]) or BLOCK_BYTES / BYTES_PER_TOKEN


def _held(replica: ReplicaSlots, blocks: Sequence[int]) -> int:
    """Return how many leading blocks a replica holds."""
    held = replica.held_prefixes
    return next((number for number, block in enumerate(blocks) if block not in held), len(blocks))
