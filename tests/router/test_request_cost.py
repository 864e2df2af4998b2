"""Python calls of the router for one request: the path of a request that asks for nothing special stays short."""

import sys
from types import FrameType
from typing import Any, Self

from tests.router.fakes import FakeReplica, Rig, a_pipeline, a_request, a_rig

REQUESTS = 30
MAX_CALLS = 424
"""For a request alone at a router with two stages: a tenth more than it makes."""


class CallCounter:
    """Number of calls of the router's Python functions, and of those of the protocol that they call."""

    def __init__(self) -> None:
        self.calls = 0

    def __enter__(self) -> Self:
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and _is_of_router(frame):
            self.calls += 1


def _is_of_router(frame: FrameType) -> bool:
    """Whether a call is the router's. The client of model servers is called by the event loop, too."""
    if "/trimtab_protocol/http_client" in frame.f_code.co_filename:
        return True
    caller: FrameType | None = frame
    while caller is not None and "/trimtab_protocol/" in caller.f_code.co_filename:
        caller = caller.f_back
    return caller is not None and "/trimtab_router/" in caller.f_code.co_filename


async def _count_calls(rig: Rig) -> int:
    with CallCounter() as counter:
        status, *_ = await rig.rest(a_request(parameters={"binary_data_output": True}))
    assert status == 200
    return counter.calls


async def test_a_plain_request_makes_few_calls():
    """The least of several requests counts: timers and probes only add calls."""
    async with a_rig(a_pipeline(2), {"stage-0": [FakeReplica()], "stage-1": [FakeReplica()]}) as rig:
        calls = [await _count_calls(rig) for _ in range(REQUESTS)]

    assert min(calls) <= MAX_CALLS
