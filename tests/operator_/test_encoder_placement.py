"""Plans with and without encoder replicas, applied by the operator."""

from typing import Any

import pytest

from tests.operator_.scene import Site
from tests.router.disaggregated import PULLS, WHOLE, a_choosing_pipeline, laid_out
from trimtab_kubernetes import Cluster, Rejected
from trimtab_operator.reconciliation.conditions import StageProgress, route_ready, stages_ready
from trimtab_pipelines.kubernetes_names import ADAPTER_MANAGER


def a_document() -> dict[str, Any]:
    document = a_choosing_pipeline().model_dump(mode="json", by_alias=True, exclude_none=True)
    document["spec"]["stages"][1]["variantPlacement"] = "Dedicated"
    return document


async def publish(site: Site, *, apart: bool, generation: int) -> None:
    plan = laid_out(site.pipeline, apart=apart, generation=generation)
    written = plan.model_dump(mode="json", by_alias=True, exclude_none=True)
    written["metadata"] = {"name": site.name, "namespace": site.namespace}
    written["spec"]["explanation"] = {"change": f"why plan {generation}", "placement": "one of two"}
    await site.cluster.apply(written, manager=ADAPTER_MANAGER)


@pytest.fixture
async def site(cluster: Cluster, namespace: str) -> Site:
    """A pipeline whose images are read whole."""
    made = Site(cluster, namespace, a_document())
    await made.apply_profiled()
    await publish(made, apart=False, generation=1)
    await made.settle()
    return made


async def test_stage_without_replicas_is_ready(site) -> None:
    assert await site.replicas() == {"small": 0, WHOLE: 1}
    assert (await site.conditions())["StagesReady"] == ("True", "AllReady")
    assert (await site.conditions())["RouteReady"] == ("True", "RouterReady")
    assert await site.good_plan() == 1


async def test_encoders_run_until_colocated_replicas_are_ready(site) -> None:
    await publish(site, apart=True, generation=2)
    await site.settle()
    assert await site.replicas() == {"small": 1, PULLS: 1, WHOLE: 0}

    await publish(site, apart=False, generation=3)
    await site.look()
    assert await site.replicas() == {"small": 1, PULLS: 1, WHOLE: 1}
    await site.settle()
    assert await site.replicas() == {"small": 0, PULLS: 0, WHOLE: 1}


async def test_colocated_encoder_requires_references(cluster, namespace) -> None:
    document = a_document()
    text = document["spec"]["stages"][1]
    text["inputs"] = [each for each in text["inputs"] if each["name"] != "references"]
    document["metadata"]["namespace"] = namespace
    with pytest.raises(Rejected, match="encoder Colocated requires role Generate"):
        await cluster.apply(document, manager="user")


def test_unplanned_replicas_are_not_reported_missing() -> None:
    idle = StageProgress("encode", wanted=0, ready=0, serving=0)
    served, gone = StageProgress("text", 1, 1, 1), StageProgress("text", 1, 0, 0)

    assert stages_ready([idle, served]).status == "True"
    assert route_ready([], 1, [idle, served]).status == "True"
    assert stages_ready([idle, gone]).message == "no ready replica in: text"
