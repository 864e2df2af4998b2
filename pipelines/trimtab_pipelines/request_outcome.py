"""How a request ends: each that is received in exactly one of five ways, so that received is the sum of all ends."""

from enum import IntEnum


class RequestOutcome(IntEnum):
    """The five ends of a request: a number in records, a word in what people and other programs read."""

    OK = 0
    LATE = 1
    DROPPED = 2
    REFUSED = 3
    FAILED = 4

    @property
    def word(self) -> str:
        """How it is told and counted."""
        return self.name.lower()


OK, LATE, DROPPED, REFUSED, FAILED = RequestOutcome
"""The same by themselves, for where every request passes: looking up a member of an enumeration takes its time."""
