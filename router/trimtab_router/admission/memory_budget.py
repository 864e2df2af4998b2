"""What requests under way hold of the process's memory: one sum for all, and a sum and a count for each client.

A reservation grows as bytes arrive, never by what was announced, and ends with its request. Answers that wait for their
readers are a sum of their own: who reads slowly takes no room from requests, and is cut where all that wait are too
much. Pure.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from trimtab_pipelines.error_codes import ErrorCode
from trimtab_router.refusal import Refusal

SMALL_BYTES = 256 * 1024
LARGE_BYTES = 1024 * 1024
LARGE_SHARE = 0.75
"""Of all bytes, what requests that are not small may hold; the rest is for the small ones, whatever the others do."""


class MemoryBudget:
    """Bytes held by all requests under way, and by each client's.

    Only clients with something under way are kept, so that whoever makes up names fills nothing. The empty name is
    nobody in particular and has no bounds of its own.

    Args:
        max_bytes: of all together.
        max_client_requests: under way for one client; 0 for any number.
        max_client_bytes: of one client's requests under way; 0 for no bound but the one for all.
        large_ended: told that a request ended which held more than LARGE_BYTES.
    """

    def __init__(
        self,
        max_bytes: int,
        max_client_requests: int = 0,
        max_client_bytes: int = 0,
        large_ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.large_ended = large_ended
        self._max_bytes = max_bytes
        self._clients = ClientQuotas(max_client_requests, max_client_bytes)
        self._held_bytes = 0
        self._asked_bytes = 0
        self._unread: dict[Reservation, Callable[[], None]] = {}
        self._unread_bytes = 0
        self.requests = 0
        """Requests let in and not answered yet."""
        self._receiving = 0

    @property
    def bytes_in_flight(self) -> int:
        """What requests hold, and answers that are not read yet."""
        return self._held_bytes + self._unread_bytes

    @property
    def waiting(self) -> int:
        """Requests that wait for us: those let in, but for those whose callers are still sending."""
        return self.requests - self._receiving

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """While a request's body comes, its caller is who takes the time: it is none of those that wait for us."""
        self._receiving += 1
        try:
            yield
        finally:
            self._receiving -= 1

    def reservation(self, client: str = "") -> "Reservation":
        """Enter one request of a client, which holds nothing yet; raises Refusal where the client has too many."""
        self._clients.enter(client)
        self.requests += 1
        return Reservation(self, client)

    def take(self, client: str, held_bytes: int, size_bytes: int) -> None:
        """Hold so many bytes more for a request that holds some; raises Refusal where they do not fit."""
        small = held_bytes + size_bytes <= SMALL_BYTES
        most_bytes = self._max_bytes if small else int(LARGE_SHARE * self._max_bytes)
        # What large requests came to cost beside what they asked for keeps no small one out.
        if (self._asked_bytes if small else self._held_bytes) + size_bytes > most_bytes:
            raise Refusal(
                ErrorCode.RESOURCE_EXHAUSTED,
                "BytesInFlight",
                f"{self._held_bytes} bytes are in flight and {size_bytes} more do not fit below "
                f"{most_bytes}; try again later",
                retry_after_seconds=1.0,
            )
        self._clients.take(client, size_bytes)
        self._held_bytes += size_bytes
        self._asked_bytes += size_bytes

    def give_back(self, asked_bytes: int) -> None:
        """So many of the bytes that were asked for are free again."""
        self._asked_bytes -= asked_bytes

    def note(self, client: str, size_bytes: int) -> None:
        """Count bytes that are there already, whatever the bounds say; others find less room."""
        self._clients.note(client, size_bytes)
        self._held_bytes += size_bytes

    def deliver(self, reservation: "Reservation", cut: Callable[[], None]) -> None:
        """Let a request's answer wait for its reader; those that wait for longest are cut where all are too much."""
        self._unread[reservation] = cut
        self._unread_bytes += reservation.answer_bytes
        self._clients.note(reservation.client, reservation.answer_bytes)
        for waiting in list(self._unread):
            if self._unread_bytes <= self._max_bytes or waiting is reservation:
                return
            end = self._unread[waiting]
            self.delivered(waiting)
            end()

    def delivered(self, reservation: "Reservation") -> None:
        """An answer is read, or nobody will read it."""
        if self._unread.pop(reservation, None) is not None:
            self._unread_bytes -= reservation.answer_bytes
            self._clients.note(reservation.client, -reservation.answer_bytes)

    def leave(self, client: str) -> None:
        """One request of a client ended."""
        self._clients.leave(client)


class Reservation(AbstractContextManager["Reservation"]):
    """The bytes one request holds, until the context ends."""

    def __init__(self, budget: MemoryBudget, client: str) -> None:
        self._budget = budget
        self.client = client
        self._ended = False
        self._answered = False
        self._asked_bytes = 0
        self.size_bytes = 0
        self.answer_bytes = 0

    def grow(self, size_bytes: int) -> None:
        """Hold so many bytes more; raises Refusal where they do not fit."""
        self._budget.take(self.client, self.size_bytes, size_bytes)
        self.size_bytes += size_bytes
        self._asked_bytes += size_bytes

    def receiving(self) -> AbstractContextManager[None]:
        """The context in which its body comes."""
        return self._budget.receiving()

    def note(self, size_bytes: int) -> None:
        """Count bytes that are there already; less than 0 gives some back."""
        if not self._ended:
            self._budget.note(self.client, size_bytes)
            self.size_bytes += size_bytes

    def answered(self) -> None:
        """Nothing is done for it any more; its answer is only being read, by a caller who may take time."""
        if not self._answered:
            self._answered = True
            self._budget.requests -= 1

    def deliver(self, size_bytes: int, cut: Callable[[], None]) -> None:
        """Hold an answer of so many bytes until the end, and nothing of the request any more; `cut` ends it early."""
        self.answered()
        self._give_back()
        self.answer_bytes = size_bytes
        self._budget.deliver(self, cut)

    def end(self) -> None:
        """Give all back; once."""
        if not self._ended:
            large = self.size_bytes + self.answer_bytes > LARGE_BYTES
            self.answered()
            self._give_back()
            self._budget.delivered(self)
            self._budget.leave(self.client)
            self._ended = True
            if large:
                self._budget.large_ended()

    def _give_back(self) -> None:
        self.note(-self.size_bytes)
        self._budget.give_back(self._asked_bytes)
        self._asked_bytes = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End it."""
        self.end()


class ClientQuotas:
    """Requests and bytes under way by client; a bound of 0 is none."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._requests: dict[str, int] = {}
        self._bytes: dict[str, int] = {}

    def __len__(self) -> int:
        """How many have something under way."""
        return len(self._requests)

    def enter(self, client: str) -> None:
        """Count a request; raises Refusal where its client has as many as it may."""
        if not client:
            return
        requests = self._requests.get(client, 0)
        if 0 < self._max_requests <= requests:
            raise _too_much(
                "ClientConcurrencyLimited", f"{requests} requests of this client are under way", "one has ended"
            )
        self._requests[client] = requests + 1

    def leave(self, client: str) -> None:
        """A request ended."""
        if not client:
            return
        self._requests[client] -= 1
        if not self._requests[client]:
            del self._requests[client]
            self._bytes.pop(client, None)

    def take(self, client: str, size_bytes: int) -> None:
        """Hold bytes; raises Refusal where the client holds as many as it may."""
        held = self._bytes.get(client, 0)
        if client and 0 < self._max_bytes < held + size_bytes:
            what = (
                f"this client's requests under way hold {held} bytes of {self._max_bytes}, {size_bytes} more do not fit"
            )
            raise _too_much("ClientBytesLimited", what, "some have ended")
        self.note(client, size_bytes)

    def note(self, client: str, size_bytes: int) -> None:
        """Count bytes, whatever the bound says."""
        if client:
            self._bytes[client] = self._bytes.get(client, 0) + size_bytes


def _too_much(reason: str, what: str, until: str) -> Refusal:
    return Refusal(ErrorCode.RESOURCE_EXHAUSTED, reason, f"{what}; try again when {until}", retry_after_seconds=1.0)
