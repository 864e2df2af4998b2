"""Certificates and keys replaced while callers call: how soon what is new is in force, and who noticed."""

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.cluster.observing import NotYetError, Watched, until
from benchmarks.cluster.visiting import ANSWERED, Visitor, visiting
from trimtab_pipelines.cluster import COMPONENT, PIPELINE_LABEL
from trimtab_router.edge.keys import new_key

VISITOR, ITS_NEXT_NAME = "visitor", "visitor-next"
CERTIFICATE_SECONDS = 120.0
"""The kubelet looks for new Secrets about once a minute, sooner where the pod itself changes."""
KEY_SECONDS = 30.0
LOOK_SECONDS = 0.02
REFUSED = 401
REFUSALS_IN_A_ROW = 25
"""So many one after the other, and a revoked key is refused for good, whichever router is asked."""
MARK = "trimtab.dev/certificate-serial"


@dataclass(frozen=True, slots=True)
class Replaced:
    """What came of it; what did not come within its time took for ever."""

    certificate_seconds: float
    accepted_seconds: float
    refused_seconds: float
    visits: int
    failed: tuple[str, ...]
    """What the visitor was told instead of an answer."""


async def replaced(watched: Watched) -> Replaced:
    """Replace the certificate, then the visitor's key, while it visits; the load's sender must not notice either."""
    known = watched.setting.credentials
    known.keys[VISITOR] = new_key()
    await _write_keys(watched)
    async with visiting(watched, VISITOR) as visitor:
        await until(lambda: _is_let_in(visitor, VISITOR), "the visitor's first key", KEY_SECONDS, LOOK_SECONDS)
    async with visiting(watched, VISITOR) as visitor:
        certificate = await _seconds(lambda: _certificate_served(watched, visitor))
        known.keys[ITS_NEXT_NAME] = new_key()
        accepted = await _seconds(lambda: _accepted(watched, visitor))
        visitor.client = ITS_NEXT_NAME
        refused = await _refused(watched, visitor)
    return Replaced(certificate, accepted, refused, visitor.answered, tuple(visitor.failed))


async def _seconds(done: Callable[[], Awaitable[object]]) -> float:
    began = time.monotonic()
    try:
        await done()
    except NotYetError:
        return math.inf
    return time.monotonic() - began


async def _certificate_served(watched: Watched, visitor: Visitor) -> None:
    """Write another certificate and wait until the visitor is shown it."""
    serial = await watched.certify()
    of = f"{PIPELINE_LABEL}={watched.name},{COMPONENT}=router"
    namespace = watched.setting.namespace
    await watched.setting.kubectl("annotate", "pods", "-n", namespace, "-l", of, "--overwrite", f"{MARK}={serial}")

    async def shown() -> bool:
        return visitor.serial == serial

    await until(shown, "the new certificate", CERTIFICATE_SECONDS, LOOK_SECONDS)


async def _accepted(watched: Watched, visitor: Visitor) -> None:
    await _write_keys(watched)
    await until(lambda: _is_let_in(visitor, ITS_NEXT_NAME), "the new key", KEY_SECONDS, LOOK_SECONDS)


async def _is_let_in(visitor: Visitor, client: str) -> bool:
    key = visitor.watched.setting.credentials.keys[client]
    async with visitor.connection() as connection:
        return (await connection.get(visitor.url, headers={"x-api-key": key})).status_code == ANSWERED


async def _refused(watched: Watched, visitor: Visitor) -> float:
    """Take the old key away; return the seconds until its first refusal on a connection that was open all the while."""
    headers = {"x-api-key": watched.setting.credentials.keys.pop(VISITOR)}
    in_a_row, first = 0, math.inf
    async with visitor.connection() as connection:
        await connection.get(visitor.url, headers=headers)
        began = time.monotonic()
        await _write_keys(watched)
        while in_a_row < REFUSALS_IN_A_ROW and time.monotonic() - began < KEY_SECONDS:
            refused = (await connection.get(visitor.url, headers=headers)).status_code == REFUSED
            first = min(first, time.monotonic() - began) if refused else math.inf
            in_a_row = in_a_row + 1 if refused else 0
    return first


async def _write_keys(watched: Watched) -> None:
    await watched.setting.apply(watched.setting.credentials.hashed(watched.setting.namespace))
