"""Certificates and keys replaced while callers call: how soon what is new is in force, and who noticed."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from benchmarks.cluster.observing import NotYetError, Watched, until
from benchmarks.cluster.visiting import ANSWERED, Visitor, address, connection, visiting
from trimtab_pipelines.kubernetes_names import COMPONENT, PIPELINE_LABEL
from trimtab_router.envoy.api_keys import new_key

ROUNDS = 5
CERTIFICATE_SECONDS = 120.0
"""The kubelet looks for new Secrets about once a minute, sooner where the pod itself changes."""
KEY_SECONDS = 30.0
LOOK_SECONDS = 0.02
REFUSED = 401
REFUSALS_IN_A_ROW = 25
"""So many one after the other, and a revoked key is refused for good, whichever router is asked."""
MARK = "trimtab.dev/certificate-serial"


@dataclass(slots=True)
class Replaced:
    """What came of it, round by round; what did not come within its time took for ever."""

    visitor: Visitor
    certificate_seconds: list[float] = field(default_factory=list)
    accepted_seconds: list[float] = field(default_factory=list)
    refused_seconds: list[float] = field(default_factory=list)


async def replaced(watched: Watched, calm_seconds: float) -> Replaced:
    """Replace the certificate, then the visitor's key, again and again while it visits, with some calm before each."""
    watched.setting.credentials.keys[_name(0)] = new_key()
    await _accepted(watched, _name(0))
    async with visiting(watched, _name(0)) as visitor:
        found = Replaced(visitor)
        for number in range(ROUNDS):
            await asyncio.sleep(calm_seconds)
            await _round(found, watched, number)
    return found


async def _round(found: Replaced, watched: Watched, number: int) -> None:
    visitor, old, new = found.visitor, _name(number), _name(number + 1)
    found.certificate_seconds.append(await _seconds(lambda: _certificate_served(watched, visitor)))
    watched.setting.credentials.keys[new] = new_key()
    found.accepted_seconds.append(await _seconds(lambda: _accepted(watched, new)))
    visitor.client = new

    async def moved() -> bool:
        return visitor.shown == new

    await until(moved, "the visitor's first request with its new key", KEY_SECONDS, LOOK_SECONDS)
    found.refused_seconds.append(await _refused(watched, old))


def _name(number: int) -> str:
    return f"visitor-{number}"


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


async def _accepted(watched: Watched, client: str) -> None:
    await _write_keys(watched)
    headers = {"x-api-key": watched.setting.credentials.keys[client]}

    async def let_in() -> bool:
        async with connection(watched) as anew:
            return (await anew.get(address(watched), headers=headers)).status_code == ANSWERED

    await until(let_in, f"the key of {client}", KEY_SECONDS, LOOK_SECONDS)


async def _refused(watched: Watched, client: str) -> float:
    """Take a key away; return the seconds until its first refusal on a connection that was open all the while."""
    headers = {"x-api-key": watched.setting.credentials.keys.pop(client)}
    in_a_row, first = 0, math.inf
    async with connection(watched) as kept:
        await kept.get(address(watched), headers=headers)
        began = time.monotonic()
        await _write_keys(watched)
        while in_a_row < REFUSALS_IN_A_ROW and time.monotonic() - began < KEY_SECONDS:
            status = (await kept.get(address(watched), headers=headers)).status_code
            if status == ANSWERED:
                in_a_row, first = 0, math.inf
            elif status == REFUSED:
                in_a_row, first = in_a_row + 1, min(first, time.monotonic() - began)
    return first


async def _write_keys(watched: Watched) -> None:
    await watched.setting.apply(watched.setting.credentials.hashed(watched.setting.namespace))
