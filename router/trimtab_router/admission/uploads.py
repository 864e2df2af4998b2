"""`Uploads`: request bodies that arrive, each at a minimum rate; the slowest is cut when requests run out of places.

An upload has a deadline: `GRACE_SECONDS` ahead of its start, and extended by each byte up to that far ahead again. The
earliest deadline is therefore that of the slowest upload, whatever it sent before.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from trimtab_router.admission.memory_budget import MemoryBudget, Reservation
from trimtab_router.refusal import Refusal

MIN_BYTES_PER_SECOND = 8 * 1024
GRACE_SECONDS = 5.0
FULL_SHARE = 0.75  # share of the places from which the slowest upload is cut; the rest is for bursts
UPLOAD_SHARE = 0.25  # share of the places that uploads keep, however many requests are being served
CLIENT_SHARE = 0.25  # share of the places beyond which a client's own uploads are cut first


class Upload:
    """One body that arrives."""

    def __init__(self, client: str, timeout: asyncio.Timeout, ends_at: float) -> None:
        self.client = client
        self.is_cut = False
        self._timeout = timeout
        self._ends_at = ends_at
        self._loop = asyncio.get_running_loop()

    @property
    def due(self) -> float:
        """Deadline of the next bytes, in seconds of the event loop."""
        return self._timeout.when() or 0.0

    def note_bytes(self, size_bytes: int) -> None:
        if not self.is_cut:
            due = min(self.due + size_bytes / MIN_BYTES_PER_SECOND, self._loop.time() + GRACE_SECONDS, self._ends_at)
            self._timeout.reschedule(due)

    def cut(self) -> None:
        if not self._timeout.expired():
            self.is_cut = True
            self._timeout.reschedule(self._loop.time())


class Uploads:
    """Bodies that arrive at a router, each within `seconds`."""

    def __init__(self, memory: MemoryBudget, seconds: float) -> None:
        self.max_requests: Callable[[], int] | None = None
        """Current number of places for large requests, while they arrive and while they are served; None: unlimited."""
        self._memory = memory
        self._seconds = seconds
        self._arriving: set[Upload] = set()

    @asynccontextmanager
    async def receive(self, reservation: Reservation) -> AsyncIterator[Upload]:
        """Context in which a body arrives. Raises Refusal 408 if it is too slow."""
        if self.max_requests is not None:
            self._make_room(self.max_requests())
        ends_at = asyncio.get_running_loop().time() + self._seconds
        timeout = asyncio.timeout(min(self._seconds, GRACE_SECONDS))
        upload = Upload(reservation.client, timeout, ends_at)
        self._arriving.add(upload)
        try:
            async with timeout:
                with reservation.receiving():
                    yield upload
        except TimeoutError as error:
            raise Refusal("BodyTimeout", self._explain(upload, ends_at)) from error
        finally:
            self._arriving.discard(upload)

    def _explain(self, upload: Upload, ends_at: float) -> str:
        if upload.is_cut:
            return "more bodies arrive than there is room for, and this one is the slowest; send it faster or try again"
        if upload.due < ends_at:
            return f"the body arrives slower than {MIN_BYTES_PER_SECOND} bytes per second; send it faster"
        return f"the body did not arrive within {self._seconds:.0f} s; send it faster, or in smaller requests"

    def _make_room(self, places: int) -> None:
        """Cut the slowest upload if nearly all places are taken: of the client with the most, if it has many."""
        arriving = [upload for upload in self._arriving if not upload.is_cut]
        taken = len(arriving) + self._memory.active_requests
        if taken < FULL_SHARE * places or len(arriving) < UPLOAD_SHARE * places:
            return
        ((client, uploads),) = Counter(upload.client for upload in arriving).most_common(1)
        if uploads > CLIENT_SHARE * places:
            arriving = [upload for upload in arriving if upload.client == client]
        min(arriving, key=lambda upload: upload.due).cut()
