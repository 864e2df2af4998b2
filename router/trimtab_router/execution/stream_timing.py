"""`StreamTiming`: arrival times of a streamed response's chunks, compared with the SLO."""

from array import array

from trimtab_pipelines.spec import ServiceLevel
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk, Usage


class StreamTiming:
    """Chunk times of one request, on the clock of its arrival. Several rows may be generated concurrently."""

    __slots__ = ("_arrived_at", "_first", "_latest", "_tokens", "gaps", "images", "time_to_first_token", "usage")

    def __init__(self, arrived_at: float, images: int = 0) -> None:
        self.images = images
        self.time_to_first_token: float | None = None
        """Seconds from arrival to the first chunk, None before it."""
        self.gaps = array("d")
        """Seconds between consecutive chunks of a row."""
        self.usage: dict[int, Usage] = {}
        """Token counts of each completed row."""
        self._arrived_at = arrived_at
        self._first: dict[int, float] = {}
        self._latest: dict[int, float] = {}
        self._tokens: dict[int, int] = {}

    def record(self, row: int, chunk: Chunk | LastChunk, now: float) -> None:
        if isinstance(chunk, LastChunk):
            self.usage[row] = chunk.usage
        if row not in self._first:
            self._first[row] = now
            self.time_to_first_token = (
                now - self._arrived_at if self.time_to_first_token is None else self.time_to_first_token
            )
        elif not isinstance(chunk, LastChunk):
            self.gaps.append(now - self._latest[row])
        if not isinstance(chunk, LastChunk):
            self._tokens[row] = self._tokens.get(row, 0) + chunk.tokens
            self._latest[row] = now

    @property
    def time_per_output_token(self) -> float:
        """Mean seconds between two tokens, of the slowest row."""
        spans = (
            (self._latest[row] - first) / (self._tokens[row] - 1)
            for row, first in self._first.items()
            if self._tokens.get(row, 0) > 1
        )
        return max(spans, default=0.0)

    def meets(self, slo: ServiceLevel) -> bool:
        late = (
            slo.time_to_first_token_seconds is not None
            and (self.time_to_first_token or 0.0) > slo.time_to_first_token_seconds
        )
        slow = (
            slo.time_per_output_token_seconds is not None
            and self.time_per_output_token > slo.time_per_output_token_seconds
        )
        return not (late or slow)
