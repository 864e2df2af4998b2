"""Pipeline of a user container on devices of a real node: measured by profile Jobs, ready, and changed under load.

Changes are of flavor and fraction, and an unhealthy device.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from tests.builders import a_pipeline_document, a_stage, a_variant
from tests.e2e.conftest import NAMESPACE, Installation
from tests.e2e.device_plugin import FOLDER, DevicePlugin
from tests.e2e.load import send
from tests.e2e.observed import ObservedPipeline, is_ready, served, until
from tests.figures import Figures
from trimtab.local.load_process import LoadOptions
from trimtab_kubernetes.objects import Object
from trimtab_pipelines.kubernetes_names import FLAVOR_LABEL
from trimtab_pipelines.request_outcome import RequestOutcome

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

NAME, CORES, REPLICAS = "devices", 0.05, 2
FLAVORS = {"whole": "trimtab.dev/gpu", "half": "trimtab.dev/gpu-half"}
LABELS = {"team": "devices"}
PROGRAM = Path(__file__).with_name("echo_server.py").read_text()
CHANGE_SECONDS, READY_SECONDS = 40.0, 300.0
LOAD = LoadOptions("constant:20", duration_seconds=CHANGE_SECONDS + 10)


def a_document(flavor: str) -> dict[str, Any]:
    """A pipeline of one model on devices and on halves of them, pinned to one flavor."""
    container: dict[str, Any] = {"image": "localhost/trimtab-control:dev", "imagePullPolicy": "Never"}
    container |= {"command": ["python", "-c", PROGRAM], "modelName": "echo"}
    resources = {"cpu": f"{1000 * CORES:g}m", "memory": "64Mi", "gpu": 1}
    variants = [
        a_variant(
            name,
            family="",
            storageUri="",
            flavor=name,
            container=container,
            resources=resources,
            podTemplate={"metadata": {"labels": LABELS}},
        )
        for name in FLAVORS
    ]
    stage = a_stage(variants=variants, pin={"variant": flavor, "replicas": REPLICAS})
    flavors = [{"name": name, "device": device, "nodeStartup": "60s"} for name, device in FLAVORS.items()]
    document = a_pipeline_document([stage], slo={"latency": "2s"}, budget={"cores": "1", "gpus": 8}, flavors=flavors)
    document["metadata"] = {"name": NAME, "namespace": NAMESPACE}
    return document


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plugins(installation: Installation) -> AsyncIterator[dict[str, DevicePlugin]]:
    """Devices, one of them spare, and halves of others, by flavor."""
    if not (FOLDER / "kubelet.sock").exists():
        pytest.skip("the node is another machine")
    counts = {"whole": REPLICAS + 1, "half": 2 * REPLICAS}
    made = {
        name: DevicePlugin(device, {f"{name}-{n}": True for n in range(counts[name])})
        for name, device in FLAVORS.items()
    }
    async with AsyncExitStack() as stack:
        for plugin in made.values():
            await stack.enter_async_context(plugin.registered())
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline(installation: Installation, plugins: dict[str, DevicePlugin]) -> AsyncIterator[ObservedPipeline]:
    async with served(installation, a_document("whole"), READY_SECONDS) as found:
        yield found


async def on_flavor(pipeline: ObservedPipeline, flavor: str) -> list[Object]:
    """The pods, if all of them are ready and on this flavor."""
    pods = await pipeline.pods()
    is_there = all(is_ready(pod) and pod["metadata"]["labels"].get(FLAVOR_LABEL) == flavor for pod in pods)
    return pods if is_there and len(pods) == REPLICAS else []


async def test_pipeline_is_ready_on_devices(pipeline: ObservedPipeline, plugins: dict[str, DevicePlugin]) -> None:
    pods = await on_flavor(pipeline, "whole")
    assert pods
    assert all(LABELS.items() <= pod["metadata"]["labels"].items() for pod in pods)
    assert len(set(plugins["whole"].allocated[-REPLICAS:])) == REPLICAS
    assert plugins["half"].allocated, "its profile Job's"


@pytest.mark.parametrize("change", ["half", "whole", "unhealthy"])
async def test_no_request_fails_during_a_change(
    pipeline: ObservedPipeline, plugins: dict[str, DevicePlugin], figures: Figures, tmp_path: Path, change: str
) -> None:
    file, begun = tmp_path / "pipeline.yaml", asyncio.Event()
    file.write_text(yaml.safe_dump(a_document("whole")))
    access = pipeline.installation.credentials.access()
    loop = asyncio.get_running_loop()

    async def strike() -> float:
        await begun.wait()
        start = loop.time()
        if change == "unhealthy":
            device = plugins["whole"].allocated[-1]
            before = {pod["metadata"]["uid"] for pod in await pipeline.pods()}
            plugins["whole"].set_health(device, healthy=False)

            async def replaced() -> bool:
                now = {pod["metadata"]["uid"] for pod in await on_flavor(pipeline, "whole")}
                return len(now & before) == REPLICAS - 1

            await until(replaced, "another replica", CHANGE_SECONDS)
        else:
            await pipeline.installation.apply(a_document(change))
            await until(lambda: on_flavor(pipeline, change), f"replicas on flavor {change}", CHANGE_SECONDS)
        return loop.time() - start

    options = LoadOptions(LOAD.load, duration_seconds=LOAD.duration_seconds, access=access)
    results, seconds = await asyncio.gather(send(file, pipeline.address, options, begun), strike())
    status = (await pipeline.document())["status"]

    figures.add(**{outcome.word: results.count(outcome) for outcome in RequestOutcome}, change_seconds=seconds)
    assert results.count(RequestOutcome.FAILED) == 0
    assert results.count(RequestOutcome.OK) > 0
    assert "schedulable" not in status
    await until(pipeline.is_ready, "Ready after the change", CHANGE_SECONDS)
