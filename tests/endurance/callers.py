"""Callers that send a steady load to several routers, with one retry at another router, and what a fault costs them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.figures import Figures

RATE_RPS = 60.0
TRY_SECONDS = 5.0
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1.0] * 4}]}
PATH = "/v2/models/sample/infer"
MAX_BAD_SHARE = 0.05
"""Of the requests of a second, that may be late or retried in a service that is whole."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request, with its retry."""

    at: float
    """Time of its first try, by the loop's clock."""
    seconds: float
    tries: int
    problems: tuple[str, ...]
    """Status or error of each try that failed."""
    failed: bool
    """Whether its last try failed as well."""


@dataclass(slots=True)
class Callers:
    """Callers of the routers at `addresses`, which take turns and may change."""

    addresses: Sequence[str]
    slo_seconds: float
    path: str = PATH
    body: Mapping[str, Any] = field(default_factory=lambda: BODY)
    rate_rps: float = RATE_RPS
    calls: list[Call] = field(default_factory=list)

    async def run(self) -> None:
        """Send requests until cancelled."""
        clock = asyncio.get_running_loop().time
        began, timeout = clock(), aiohttp.ClientTimeout(total=TRY_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as requests:
            for number in range(10**9):
                await asyncio.sleep(began + number / self.rate_rps - clock())
                requests.create_task(self._call(session, number))

    async def _call(self, session: aiohttp.ClientSession, number: int) -> None:
        clock, tries, answered = asyncio.get_running_loop().time, 0, False
        began = clock()
        problems: list[str] = []
        while not answered and tries < 2:
            url = f"http://{self.addresses[(number + tries) % len(self.addresses)]}{self.path}"
            tries += 1
            try:
                async with session.post(url, json=self.body) as response:
                    await response.read()
                    answered = response.status == 200
                    problem = str(response.status)
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = type(error).__name__
            problems += [] if answered else [problem]
        self.calls.append(Call(began, clock() - began, tries, tuple(problems), failed=not answered))

    def report(self, figures: Figures, since: float, bound_seconds: float, whole_seconds: float = 0.0) -> None:
        """Report the requests since a fault, and the seconds until they and its parts were as before."""
        calls = [call for call in self.calls if call.at >= since]
        answered_seconds = self._bad_until(since, calls)
        failed = sum(call.failed for call in calls)
        figures.add(requests=len(calls), failed=failed, retried=sum(call.tries > 1 for call in calls))
        figures.add(late=sum(call.seconds > self.slo_seconds for call in calls))
        figures.add(in_time_after_seconds=answered_seconds, whole_after_seconds=round(whole_seconds, 2))
        figures.add(problems="; ".join(sorted({problem for call in calls for problem in call.problems})) or None)
        figures.require("failed requests", failed, "==", 0)
        seconds = max(answered_seconds, whole_seconds)
        figures.require("seconds until whole", seconds, "<=", bound_seconds, depends_on_load=True)

    def bad_share(self, since: float) -> float:
        """Share of the requests that were not answered by their first try and in time."""
        bad = [self._is_bad(call) for call in self.calls if call.at >= since]
        return sum(bad) / max(len(bad), 1)

    def _is_bad(self, call: Call) -> bool:
        return call.failed or call.tries > 1 or call.seconds > self.slo_seconds

    def _bad_until(self, since: float, calls: Sequence[Call]) -> float:
        """End of the last second of which too many requests failed, were late or were retried."""
        by_second: dict[int, list[bool]] = {}
        for call in calls:
            by_second.setdefault(int(call.at - since), []).append(self._is_bad(call))
        bad = [second for second, found in by_second.items() if sum(found) > MAX_BAD_SHARE * len(found)]
        return max(bad, default=-1) + 1.0


@dataclass(frozen=True, slots=True)
class Moments:
    """When a fault began, when it had been made, and when all was whole again, on the event loop's clock."""

    began: float
    struck: float
    whole: float


async def send_through(
    callers: Callers, strike: Callable[[], Awaitable[Any]], mend: Callable[[], Awaitable[Any]], calm_seconds: float
) -> Moments:
    """Send a load before, during and after a fault; `mend` returns when all is whole."""
    clock = asyncio.get_running_loop().time
    async with sending(callers):
        await asyncio.sleep(calm_seconds)
        began = clock()
        await strike()
        struck = clock()
        await mend()
        whole = clock()
        await asyncio.sleep(calm_seconds)
    return Moments(began, struck, whole)


@asynccontextmanager
async def sending(callers: Callers) -> AsyncIterator[Callers]:
    """Send a load until the block ends."""
    requests = asyncio.create_task(callers.run())
    try:
        yield callers
    finally:
        requests.cancel()
        await asyncio.gather(requests, return_exceptions=True)
