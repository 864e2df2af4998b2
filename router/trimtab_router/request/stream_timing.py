"""When the pieces of a request's answer came, and whether that was in time. Pure."""

from array import array

from trimtab_pipelines.spec import ServiceLevel
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk, Usage


class StreamTiming:
    """The pieces of one request's answer, as they come; several rows are written side by side.

    Args:
        arrived_at: when the request came, in seconds of the pieces' clock.
        images: what the request shows.
    """

    __slots__ = ("_arrived_at", "_first", "_latest", "_tokens", "first_seconds", "gaps", "images", "usage")

    def __init__(self, arrived_at: float, images: int = 0) -> None:
        self.images = images
        self.first_seconds: float | None = None
        """From arrival to the first piece; None before it."""
        self.gaps = array("d")
        """Seconds from one piece of a row to its next."""
        self.usage: dict[int, Usage] = {}
        """What each row took that is whole."""
        self._arrived_at = arrived_at
        self._first: dict[int, float] = {}
        self._latest: dict[int, float] = {}
        self._tokens: dict[int, int] = {}

    def note(self, row: int, piece: Chunk | LastChunk, now: float) -> None:
        """A piece came."""
        if isinstance(piece, LastChunk):
            self.usage[row] = piece.usage
        if row not in self._first:
            self._first[row] = now
            self.first_seconds = now - self._arrived_at if self.first_seconds is None else self.first_seconds
        elif not isinstance(piece, LastChunk):
            self.gaps.append(now - self._latest[row])
        if not isinstance(piece, LastChunk):
            self._tokens[row] = self._tokens.get(row, 0) + piece.tokens
            self._latest[row] = now

    @property
    def token_seconds(self) -> float:
        """Between two tokens of a row, on average, of the slowest row."""
        spans = (
            (self._latest[row] - first) / (self._tokens[row] - 1)
            for row, first in self._first.items()
            if self._tokens.get(row, 0) > 1
        )
        return max(spans, default=0.0)

    def keeps(self, slo: ServiceLevel) -> bool:
        """Whether it began in time and went on fast enough, as far as either is promised."""
        late = (
            slo.time_to_first_token_seconds is not None
            and (self.first_seconds or 0.0) > slo.time_to_first_token_seconds
        )
        slow = slo.time_per_output_token_seconds is not None and self.token_seconds > slo.time_per_output_token_seconds
        return not (late or slow)
