"""`StopFilter`: releases generated text once it can no longer be part of a stop string.

Stop strings are found across token boundaries; text that may begin one is withheld.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Detokenize = Callable[[int], str]
"""Maps a request's tokens, one by one, to the text that each completes (``""`` inside a multi-byte character)."""


@dataclass(frozen=True, slots=True)
class ReleasedText:
    """Text that may be streamed now."""

    text: str
    stopped: bool
    """Whether a stop string follows the text and ends the generation."""


class StopFilter:
    """Filters the text of one request. It never releases a stop string or the text after it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""

    def add(self, text: str) -> ReleasedText:
        """Append text; return the text that can no longer become part of a stop string."""
        self._pending += text
        matches = [at for stop in self._stops if (at := self._pending.find(stop)) >= 0]
        if matches:
            released, self._pending = self._pending[: min(matches)], ""
            return ReleasedText(released, stopped=True)
        withheld = max((_overlap(self._pending, stop) for stop in self._stops), default=0)
        end = len(self._pending) - withheld
        released, self._pending = self._pending[:end], self._pending[end:]
        return ReleasedText(released, stopped=False)

    def flush(self) -> str:
        """Return the withheld text, once no stop string can follow."""
        released, self._pending = self._pending, ""
        return released


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
