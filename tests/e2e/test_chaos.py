"""Faults of a real cluster under steady load: what clients see, and how soon everything is as before."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e import faults
from tests.e2e.clients import retrying
from tests.e2e.conftest import ROOT, Installation, pipeline_document
from tests.e2e.faults import RECOVERY_SECONDS, Fault
from tests.e2e.load import free_cores, load_within, send
from tests.e2e.observed import READY_SECONDS, ObservedPipeline, observed, until
from tests.figures import Figures
from trimtab.local.load_process import LoadOptions
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.request_outcome import RequestOutcome

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(3600)]

DIGITS = ROOT / "pipelines" / "digits" / "pipeline.yaml"
LOAD_SECONDS = 30.0
CALM_SECONDS = 5.0
LOAD_SHARE = 0.2
HOLDS_REQUESTS = {faults.delete_router_pod, faults.kill_envoys}
"""Faults of processes that hold requests at that moment: those requests may fail."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def digits(installation: Installation) -> AsyncIterator[ObservedPipeline]:
    """The digits pipeline with two routers, and one that reads its weights from MinIO while there is room for it."""
    document = pipeline_document(DIGITS)
    document["spec"]["router"] = {"replicas": 2}
    async with observed(installation, document["metadata"]["name"]) as pipeline:
        await installation.apply(document)
        await pipeline.wait_until_ready(READY_SECONDS)
        await faults.serve_from_minio(installation, DIGITS)
        yield pipeline


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rate_rps(digits: ObservedPipeline) -> float:
    """A load that one replica of each stage carries easily."""
    cores = await free_cores(digits.installation)
    return LOAD_SHARE * load_within(load_pipeline(DIGITS), await digits.profiles(), cores).high_rps


@pytest.mark.parametrize(
    "fault",
    [
        faults.delete_model_pod,
        faults.delete_model_pod_on_full_nodes,
        faults.delete_router_pod,
        faults.restart_routers,
        faults.kill_envoys,
        pytest.param(faults.kill("app.kubernetes.io/component=operator"), id="kill_operator"),
        pytest.param(faults.kill("app.kubernetes.io/component=adapter"), id="kill_adapter"),
        pytest.param(faults.kill("app=prometheus"), id="kill_prometheus"),
        faults.restart_api_server,
        faults.delete_deployment,
        faults.break_plan,
        faults.apply_missing_image,
        faults.stop_minio,
    ],
    ids=lambda fault: fault.__name__,
)
async def test_requests_survive(digits: ObservedPipeline, rate_rps: float, fault: Fault, figures: Figures) -> None:
    """The load is steady; the fault strikes after some calm."""
    await until(digits.is_ready, "Ready before the fault", RECOVERY_SECONDS)
    access, begun = digits.installation.credentials.access(), asyncio.Event()
    options = LoadOptions(f"constant:{rate_rps:.3g}", duration_seconds=LOAD_SECONDS, access=access)

    async def strike() -> float:
        await begun.wait()
        await asyncio.sleep(CALM_SECONDS)
        began = time.monotonic()
        await fault(digits)
        return time.monotonic() - began

    async with retrying(digits) as retried:
        results, seconds = await asyncio.gather(send(DIGITS, digits.address, options, begun), strike())

    figures.add(**{outcome.word: results.count(outcome) for outcome in RequestOutcome}, recovery_seconds=seconds)
    failures = results.records[results.records["outcome"] == RequestOutcome.FAILED]
    if fault not in HOLDS_REQUESTS:
        assert list(failures) == []
    assert results.count(RequestOutcome.OK) > 0
    assert retried.lost == 0
    assert seconds <= RECOVERY_SECONDS
