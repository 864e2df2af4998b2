"""Text told as soon as it is certain: stop strings found across tokens, what may begin one held back. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Spell = Callable[[int], str]
"""Takes a request's tokens one by one and returns the text each makes certain (``""`` inside a character)."""


@dataclass(frozen=True, slots=True)
class ReleasedText:
    """Text to tell now, and whether a stop string ended the answer with it."""

    text: str
    stopped: bool


class StopFilter:
    """Follows one answer. Neither a stop string nor what follows it is ever told."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def add(self, text: str) -> ReleasedText:
        """Take text in; tell what can no longer become part of a stop string."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            told, self._held = self._held[: min(found)], ""
            return ReleasedText(told, stopped=True)
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        at = len(self._held) - keep
        told, self._held = self._held[:at], self._held[at:]
        return ReleasedText(told, stopped=False)

    def rest(self) -> str:
        """Tell what was held back: the answer ended otherwise."""
        told, self._held = self._held, ""
        return told


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with, less than all of it."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
