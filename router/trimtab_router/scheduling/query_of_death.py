"""Remembers the rows that were in the hands of every replica that was lost over them, so that they take no more. Pure.

Who sends a query of death once most likely sends it again. What is remembered is a digest, for a while, of the newest
few; and only work of the very size of a suspect is looked at closely, so that everybody else pays nothing.
"""

from collections import Counter
from hashlib import blake2b

from trimtab_protocol.tensors import encode_raw_array
from trimtab_router.refusal import Refusal, invalid_for
from trimtab_router.scheduling.stage_request import Signature, StageRequest

MAX_SUSPECTS = 256
REFUSED_SECONDS = 600.0
MAX_DIGESTED_BYTES = 2**20
"""Of each tensor, from its beginning: looking closely must not hold the event loop up."""

_Size = tuple[str, int, Signature]


class QueryOfDeathDetector:
    """Digests of rows that cost replicas, by stage. Times are monotonic seconds."""

    def __init__(self, most: int = MAX_SUSPECTS, refused_seconds: float = REFUSED_SECONDS) -> None:
        self._most = most
        self._refused_seconds = refused_seconds
        self._until: dict[bytes, tuple[float, _Size]] = {}
        self._sizes: Counter[_Size] = Counter()

    def __len__(self) -> int:
        """How many are remembered."""
        return len(self._until)

    def add(self, request: StageRequest, now: float) -> None:
        """Remember the rows of a work from now on."""
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

    def refusal_of(self, request: StageRequest, now: float) -> Refusal | None:
        """Why these rows are not served now; None where nothing is held against them."""
        if not self._sizes or _size(request) not in self._sizes:
            return None
        self._forget(now)
        until, _ = self._until.get(_digest(request), (now, None))
        if until <= now:
            return None
        return invalid_for(
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
        found = self._until.pop(digest, None)
        if found is not None:
            self._sizes[found[1]] -= 1
            if not self._sizes[found[1]]:
                del self._sizes[found[1]]


def _size(request: StageRequest) -> _Size:
    return request.stage, request.rows, request.signature


def _digest(request: StageRequest) -> bytes:
    digest = blake2b(request.stage.encode(), digest_size=16)
    for name in sorted(request.inputs):
        digest.update(name.encode() + b"\0")
        digest.update(memoryview(encode_raw_array(request.inputs[name]))[:MAX_DIGESTED_BYTES])
    return digest.digest()
