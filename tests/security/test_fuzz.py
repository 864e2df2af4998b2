"""Random requests and documents: to decoders and controllers here, and to a served pipeline beside friendly clients.

A request or document depends on its number only. `--requests 100000` sends more of them.
"""

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

import psutil
import pytest

from tests.figures import Figures
from tests.security import generators
from tests.security.conftest import MODEL, Server
from tests.security.documents import Defects, adapt, operate, route, some_documents
from tests.security.raw_http import NOTHING, ask, call
from trimtab_protocol import ProtocolError, grpc_messages, rest

CLIENTS = 6
WARM_UP_SHARE = 0.1
MAX_GROWTH = 0.05
DOCUMENTS, PARTS = 30_000, 10
SOME_DOCUMENTS = range(40)
ALL_DOCUMENTS = [range(DOCUMENTS)[part * DOCUMENTS // PARTS : (part + 1) * DOCUMENTS // PARTS] for part in range(PARTS)]
"""Seeds; the parts of all run side by side."""
NAMED = re.compile(r"\b(apiVersion|kind|spec|stage|budget|slo)\b")
"""A field, or what a plan cannot be made for."""
FAULTS = {"500", "INTERNAL", NOTHING}
"""Responses that blame the server."""
SENT: dict[str, tuple[Callable[[Random], bytes], bool]] = {
    "REST to Envoy": (generators.rest_request, False),
    "REST to the router": (generators.rest_request, True),
    "gRPC to the router": (generators.grpc_call, True),
}
"""Kinds of requests, and whether they go to the router's own socket."""


@pytest.fixture
def defects() -> Iterator[Defects]:
    found = Defects()
    logging.getLogger().addHandler(found)
    logging.disable(logging.WARNING)  # pytest would keep each refusal of each document
    yield found
    logging.disable(logging.NOTSET)
    logging.getLogger().removeHandler(found)


def decode_body(draw: Random) -> None:
    body = generators.rest_body(draw)
    rest.decode_request(MODEL, body.content, body.header_length)


def decode_message(draw: Random) -> None:
    grpc_messages.read_request(generators.grpc_message(draw), generators.MAX_BYTES).decode()


@pytest.mark.parametrize("decode", [decode_body, decode_message])
def test_decoders_raise_protocol_errors_only(decode: Callable[[Random], None], request_count: int) -> None:
    valid = 0
    for number in range(request_count):
        try:
            decode(Random(number))
            valid += 1
        except ProtocolError:
            pass
        except Exception as error:
            error.add_note(f"request {number}")
            raise

    assert 0.1 < valid / request_count < 0.8, "some requests are valid, and most are not"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "numbers", [SOME_DOCUMENTS, *(pytest.param(part, marks=pytest.mark.security) for part in ALL_DOCUMENTS)], ids=str
)
async def test_documents_are_accepted_or_refused(numbers: range, defects: Defects, figures: Figures) -> None:
    """Operator, adapter and router neither raise nor log an exception, and name what they refuse."""
    accepted: Counter[str] = Counter()
    seconds = []
    for number in numbers:
        draw = Random(number)
        changed = some_documents(draw)
        readers = {"operator": operate(changed), "adapter": adapt(changed, draw), "router": route(changed)}
        for reader, reading in readers.items():
            began = time.thread_time()
            try:
                refusal = await reading
                defects.require_none()
            except Exception as error:
                error.add_note(f"{reader} of documents {number}, whose {changed.changed} is changed")
                raise
            seconds.append(time.thread_time() - began)
            accepted[reader] += not refusal
            assert not refusal or NAMED.search(refusal), f"{reader} of documents {number}: {refusal}"
    if numbers != SOME_DOCUMENTS:
        figures.add(documents=len(numbers), **{f"accepted_by_{reader}": number for reader, number in accepted.items()})
        figures.require("longest of one document, processor seconds", round(max(seconds), 3), "<=", 5.0)

    assert all(0.2 < number / len(numbers) < 0.9 for number in accepted.values()), accepted


@pytest.mark.security
@pytest.mark.timeout(3600)
async def test_served_pipeline_survives_random_requests(hostile: Server, request_count: int, figures: Figures) -> None:
    """No response blames the server, and no process grows after the first tenth."""
    processes, warm = hostile.processes(), int(WARM_UP_SHARE * request_count)
    await send(hostile, iter(range(warm)))
    before = {name: psutil.Process(pid).memory_info().rss for name, pid in processes.items()}
    codes = await send(hostile, iter(range(warm, request_count)))
    figures.add(**{f"responses_{code}": count for code, count in codes.items()})

    for name, pid in processes.items():
        growth = psutil.Process(pid).memory_info().rss / before[name]
        bound = 1 + MAX_GROWTH
        figures.require(f"memory of {name} relative to a tenth", round(growth, 3), "<=", bound)


async def send(server: Server, numbers: Iterator[int]) -> Counter[str]:
    """Send one request of each kind per number, over several connections; returns how many got which response."""
    codes: Counter[str] = Counter()

    async def client() -> None:
        for number in numbers:
            for kind, (generate, to_router) in SENT.items():
                place = server.router_socket if to_router else server.local.rest_port
                code = await (call if generate is generators.grpc_call else ask)(place, generate(Random(number)))
                assert code not in FAULTS, f"{kind} {number}: {code}"
                codes[code] += 1

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return codes
