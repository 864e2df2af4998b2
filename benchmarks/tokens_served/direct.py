"""Batches sent to a replica by hand, one after the other: what mixing tasks costs, and what a change of point does."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np
from numpy.typing import NDArray

from trimtab_protocol import InferRequest, InferResponse, Tensor, rest
from trimtab_protocol.extensions import COMPUTE_SECONDS, OPERATING_POINT

BATCH = 8
WAITING = 16
"""Rows that wait at any time, of random tasks: what batches are made of."""
Choice = Callable[[list[int]], list[int]]
"""Which of the tasks that wait leave together, by their places."""


def mixed(waiting: list[int]) -> list[int]:
    """Leave in the order of arrival, whatever the tasks."""
    return list(range(min(BATCH, len(waiting))))


def split(waiting: list[int]) -> list[int]:
    """Only rows of the oldest one's task leave together."""
    return [place for place, task in enumerate(waiting) if task == waiting[0]][:BATCH]


@dataclass(frozen=True, slots=True)
class Direct:
    """A replica's data port.

    Attributes:
        session: what calls are made with.
        url: of a variant there.
        pixels: images uint8 [n, 1, side, side].
    """

    session: aiohttp.ClientSession
    url: str
    pixels: NDArray[np.uint8]

    async def facts(self) -> dict[str, object]:
        """What the variant's metadata tell beyond the protocol."""
        async with self.session.get(self.url) as answer:
            found: dict[str, object] = (await answer.json())["parameters"]
            return found

    async def infer(self, tasks: Sequence[int], point: str) -> InferResponse:
        """One batch, a row for each task."""
        inputs = (Tensor.of("image", self.pixels[: len(tasks)]), Tensor.of("task", np.array(tasks, np.int64)))
        buffers, length = rest.encode_request(
            InferRequest(model_name="direct", inputs=inputs, parameters={OPERATING_POINT: point})
        )
        headers = {rest.HEADER_LENGTH: str(length), "Content-Type": rest.BINARY_CONTENT_TYPE}
        body = b"".join(bytes(one) for one in buffers)
        async with self.session.post(f"{self.url}/infer", data=body, headers=headers) as answer:
            answer.raise_for_status()
            return rest.decode_response(await answer.read(), answer.headers.get(rest.HEADER_LENGTH))

    async def rows_per_second(self, tasks: Iterator[int], choice: Choice, point: str, seconds: float) -> float:
        """Rows served a second while so many wait as there is room for."""
        waiting, served = [next(tasks) for _ in range(WAITING)], 0
        began = time.perf_counter()
        while (now := time.perf_counter()) - began < seconds:
            leaving = choice(waiting)
            await self.infer([waiting[place] for place in leaving], point)
            served += len(leaving)
            gone = set(leaving)
            waiting = [task for place, task in enumerate(waiting) if place not in gone]
            waiting += [next(tasks) for _ in leaving]
        return served / (now - began)

    async def milliseconds(self, points: Sequence[str], batches: int) -> dict[str, list[float]]:
        """Milliseconds of so many batches at each point, these taking turns."""
        taken: dict[str, list[float]] = {point: [] for point in points}
        for index in range(batches * len(points)):
            point = points[index % len(points)]
            answer = await self.infer([0] * BATCH, point)
            seconds = answer.parameters[COMPUTE_SECONDS]
            taken[point].append(1000.0 * float(seconds))
        return taken
