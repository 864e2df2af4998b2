"""`QueryOfDeathDetector`: rejects rows that were on every replica lost while serving them.

A client that sends a query of death once is likely to send it again. The detector keeps digests of recent ones for a
while. It computes the digest of a request only if its size equals that of a suspect, so that other requests cost
nothing.
"""

from collections import Counter
from hashlib import blake2b

from trimtab_protocol.tensors import encode_raw_array
from trimtab_router.refusal import Refusal
from trimtab_router.scheduling.batch_completion import MAX_LOST_REPLICAS
from trimtab_router.scheduling.interfaces import Feature
from trimtab_router.scheduling.replica_slots import Batch, BatchOutcome, ReplicaLost
from trimtab_router.scheduling.stage_request import Signature, StageRequest

MAX_SUSPECTS = 256
REFUSED_SECONDS = 600.0
MAX_DIGESTED_BYTES = 2**20  # of each tensor, from its beginning, so that hashing does not block the event loop

_Size = tuple[str, int, Signature]


class QueryOfDeathDetector(Feature):
    """Digests of rows that cost replicas, by stage, for all schedulers of a router. Times are monotonic seconds."""

    def __init__(self, max_suspects: int = MAX_SUSPECTS, refused_seconds: float = REFUSED_SECONDS) -> None:
        self._most = max_suspects
        self._refused_seconds = refused_seconds
        self._until: dict[bytes, tuple[float, _Size]] = {}
        self._sizes: Counter[_Size] = Counter()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, request: StageRequest, now: float) -> None:
        if request.closed:
            return
        self._forget(now)
        digest = _digest(request)
        self._remove(digest)
        while len(self._until) >= self._most:
            self._remove(next(iter(self._until)))
        size = _size(request)
        self._until[digest] = (now + self._refused_seconds, size)
        self._sizes[size] += 1

    def on_batch_end(self, batch: Batch, outcome: BatchOutcome, now: float) -> None:
        """Remember rows whose replicas were lost each time they computed them."""
        if isinstance(outcome, ReplicaLost) and outcome.delivered and batch.is_computing:
            for row_slice in batch.row_slices:
                if row_slice.attempts + 1 >= MAX_LOST_REPLICAS:
                    self.add(row_slice.request, now)

    def refusal_of(self, request: StageRequest, now: float) -> Refusal | None:
        if not self._sizes or _size(request) not in self._sizes:
            return None
        self._forget(now)
        until, _ = self._until.get(_digest(request), (now, None))
        if until <= now:
            return None
        return Refusal(
            "SuspectedQueryOfDeath",
            f"stage {request.stage}: replicas were lost each time they served these very rows; "
            f"they are not taken for another {until - now:.0f} s",
            stage=request.stage,
        )

    def _forget(self, now: float) -> None:
        while self._until:
            digest, (until, _) = next(iter(self._until.items()))
            if until > now:
                break
            self._remove(digest)

    def _remove(self, digest: bytes) -> None:
        entry = self._until.pop(digest, None)
        if entry is not None:
            self._sizes[entry[1]] -= 1
            if not self._sizes[entry[1]]:
                del self._sizes[entry[1]]


def _size(request: StageRequest) -> _Size:
    return request.stage, request.rows, request.signature


def _digest(request: StageRequest) -> bytes:
    digest = blake2b(request.stage.encode(), digest_size=16)
    for name in sorted(request.inputs):
        digest.update(name.encode() + b"\0")
        digest.update(memoryview(encode_raw_array(request.inputs[name]))[:MAX_DIGESTED_BYTES])
    return digest.digest()
