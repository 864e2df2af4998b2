"""`MemoryBudget`: memory of the requests in flight, in total and per client.

A reservation grows as bytes arrive, never by an announced length, and ends with its request. Responses that wait for a
slow reader are counted apart: they take no memory from requests, and the oldest are aborted if they need too much.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType

from trimtab_router.limits import LARGE_SHARE, SMALL_BYTES
from trimtab_router.refusal import Refusal

LARGE_BYTES = 1024 * 1024


class MemoryBudget:
    """Bytes held by all requests in flight, and by those of each client. A bound of 0 is none.

    Only clients with requests in flight are stored, so that invented names need no memory. The empty name is an unknown
    client and has no bounds of its own. `on_large_end` is called when a request that held more than LARGE_BYTES ends.
    """

    def __init__(
        self,
        max_bytes: int,
        max_client_requests: int = 0,
        max_client_bytes: int = 0,
        on_large_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.on_large_end = on_large_end
        self._max_bytes = max_bytes
        self.clients = ClientQuotas(max_client_requests, max_client_bytes)
        self.held_bytes = 0  # bytes of requests
        self.requested_bytes = 0  # bytes that were reserved as they arrived
        self._unread: dict[Reservation, Callable[[], None]] = {}
        self._unread_bytes = 0
        self.requests = 0  # requests admitted and not answered yet
        self._receiving = 0

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of requests, and of responses that are not read yet."""
        return self.held_bytes + self._unread_bytes

    @property
    def active_requests(self) -> int:
        return self.requests - self._receiving

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Context in which a request's body arrives. The request does not count as active meanwhile."""
        self._receiving += 1
        try:
            yield
        finally:
            self._receiving -= 1

    def reservation(self, client: str = "") -> "Reservation":
        """Add a request of a client, holding nothing yet. Raises Refusal if the client has too many."""
        usage = self.clients.add_request(client)
        self.requests += 1
        return Reservation(self, client, usage)

    def check(self, reservation: "Reservation", size_bytes: int) -> None:
        """Raise Refusal if a request's next bytes do not fit."""
        small = reservation.size_bytes + size_bytes <= SMALL_BYTES
        max_bytes = self._max_bytes if small else int(LARGE_SHARE * self._max_bytes)
        # Bytes that large requests need beyond their reservations do not count against small requests.
        if (self.requested_bytes if small else self.held_bytes) + size_bytes > max_bytes:
            raise Refusal(
                "BytesInFlight",
                f"{self.held_bytes} bytes are in flight and {size_bytes} more do not fit below "
                f"{max_bytes}; try again later",
            )
        if self.clients.max_bytes:
            self.clients.check_bytes(reservation.client, reservation.usage, size_bytes)

    def hold_response(self, reservation: "Reservation", abort: Callable[[], None]) -> None:
        """Count a response that waits for its reader. If all responses need too much, abort the oldest."""
        self._unread[reservation] = abort
        self._unread_bytes += reservation.response_bytes
        reservation.usage.held_bytes += reservation.response_bytes
        for active_requests in list(self._unread):
            if self._unread_bytes <= self._max_bytes or active_requests is reservation:
                return
            end = self._unread[active_requests]
            self.release_response(active_requests)
            end()

    def release_response(self, reservation: "Reservation") -> None:
        if self._unread.pop(reservation, None) is not None:
            self._unread_bytes -= reservation.response_bytes
            reservation.usage.held_bytes -= reservation.response_bytes


class Reservation(AbstractContextManager["Reservation"]):
    """Bytes that one request holds until the context ends."""

    def __init__(self, budget: MemoryBudget, client: str, usage: "ClientUsage") -> None:
        self._budget = budget
        self.client = client
        self.usage = usage
        self._ended = False
        self._served = False
        self._requested_bytes = 0
        self.size_bytes = 0
        self.response_bytes = 0

    def grow(self, size_bytes: int) -> None:
        self._budget.check(self, size_bytes)
        self._budget.requested_bytes += size_bytes
        self._requested_bytes += size_bytes
        self.record(size_bytes)

    def receiving(self) -> AbstractContextManager[None]:
        return self._budget.receiving()

    def record(self, size_bytes: int) -> None:
        """Count bytes that exist already. A negative size releases some."""
        if not self._ended:
            self._budget.held_bytes += size_bytes
            self.usage.held_bytes += size_bytes
            self.size_bytes += size_bytes

    def mark_served(self) -> None:
        if not self._served:
            self._served = True
            self._budget.requests -= 1

    def hold_response(self, size_bytes: int, abort: Callable[[], None]) -> None:
        """Replace the request's bytes by those of its response. `abort` ends the response early."""
        self.mark_served()
        self._release()
        self.response_bytes = size_bytes
        self._budget.hold_response(self, abort)

    def end(self) -> None:
        if not self._ended:
            large = self.size_bytes + self.response_bytes > LARGE_BYTES
            if not self._served:
                self.mark_served()
            self._release()
            if self.response_bytes:
                self._budget.release_response(self)
            self._budget.clients.remove_request(self.client, self.usage)
            self._ended = True
            if large:
                self._budget.on_large_end()

    def _release(self) -> None:
        self.record(-self.size_bytes)
        self._budget.requested_bytes -= self._requested_bytes
        self._requested_bytes = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()


@dataclass(slots=True)
class ClientUsage:
    """Requests in flight of one client, and the bytes that they hold."""

    requests: int = 0
    held_bytes: int = 0


class ClientQuotas:
    """Requests and bytes in flight per client. A bound of 0 is none."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests = max_requests
        self.max_bytes = max_bytes
        self._usages: dict[str, ClientUsage] = {}

    def __len__(self) -> int:
        return len(self._usages)

    def add_request(self, client: str) -> ClientUsage:
        usage = self._usages.get(client)
        if usage is None:
            usage = ClientUsage()
            if client:
                self._usages[client] = usage
        elif 0 < self._max_requests <= usage.requests:
            raise _client_refusal(
                "ClientConcurrencyLimited", f"{usage.requests} requests of this client are in flight", "one has ended"
            )
        usage.requests += 1
        return usage

    def remove_request(self, client: str, usage: ClientUsage) -> None:
        usage.requests -= 1
        if not usage.requests:
            self._usages.pop(client, None)

    def check_bytes(self, client: str, usage: ClientUsage, size_bytes: int) -> None:
        if client and 0 < self.max_bytes < usage.held_bytes + size_bytes:
            cause = (
                f"this client's requests in flight hold {usage.held_bytes} bytes of {self.max_bytes}, "
                f"{size_bytes} more do not fit"
            )
            raise _client_refusal("ClientBytesLimited", cause, "some have ended")


def _client_refusal(reason: str, cause: str, remedy: str) -> Refusal:
    return Refusal(reason, f"{cause}; try again when {remedy}")
