"""Endpoints read from EndpointSlices."""

from typing import Any

import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from tests.router.engines import MODEL, an_engine_pipeline
from trimtab_pipelines.endpoints import Endpoint
from trimtab_router.watchers.endpoint_slices import ready_endpoints

CONTAINER = {"family": "", "storageUri": "", "container": {"image": "someone/else:1", "port": 8000, "modelName": "m"}}
PIPELINE = a_pipeline(
    [
        a_stage("first", variants=[a_variant("small"), a_variant("large", accuracy=0.95)]),
        a_stage("second", "first.outputs.y", variants=[a_variant("theirs", **CONTAINER)]),
    ]
)


def a_slice(
    *endpoints: dict[str, Any],
    name: str = "sample-first-abc",
    stage: str = "first",
    variants: tuple[str, ...] = ("small", "large"),
    port: int = 9000,
    kind: str = "IPv4",
) -> dict[str, Any]:
    labels = {"trimtab.dev/pipeline": "sample", "trimtab.dev/stage": stage}
    labels |= {f"variant.trimtab.dev/{variant}": "true" for variant in variants}
    return {
        "metadata": {"name": name, "labels": labels},
        "addressType": kind,
        "endpoints": list(endpoints),
        "ports": [{"name": "data", "port": port, "protocol": "TCP"}],
    }


def a_pod(name: str = "pod-0", address: str = "10.0.0.1", **conditions: bool) -> dict[str, Any]:
    said = {"ready": True, "serving": True, "terminating": False} | conditions
    return {"addresses": [address], "conditions": said, "targetRef": {"kind": "Pod", "name": name}}


TERMINATING = {"ready": False, "serving": True, "terminating": True}


def first(*slices: dict[str, Any], proven: frozenset[str] = frozenset()) -> list[tuple[str, str, bool]]:
    found = ready_endpoints(slices, PIPELINE, proven).stages["first"]
    return [(endpoint.name, endpoint.address, endpoint.draining) for endpoint in found]


def test_pods_of_all_services_of_a_stage():
    assert first(
        a_slice(a_pod("b", "10.0.0.2"), a_pod("a", "10.0.0.1"), variants=("small",)),
        a_slice(a_pod("c", "10.0.0.3"), name="sample-first-xyz", variants=("large",)),
    ) == [("a", "10.0.0.1:9000", False), ("b", "10.0.0.2:9000", False), ("c", "10.0.0.3:9000", False)]


def test_the_labels_say_which_variants():
    found = ready_endpoints([a_slice(a_pod(), variants=("large", "forgotten"))], PIPELINE)

    assert found.stages["first"][0].variants == ("large",)
    assert found.stages["second"] == ()


def test_a_container_keeps_its_own_names_and_port():
    found = ready_endpoints([a_slice(a_pod(), stage="second", variants=("theirs",), port=8000)], PIPELINE)

    assert found.stages["second"] == (
        Endpoint(name="pod-0", address="10.0.0.1:8000", variants=("theirs",), model_names={"theirs": "m"}),
    )


def test_openai_container_is_probed_at_its_ready_path():
    found = ready_endpoints([a_slice(a_pod(), stage="text", variants=("small",), port=8000)], an_engine_pipeline())

    (endpoint,) = found.stages["text"]
    assert (endpoint.protocol, endpoint.ready_path, endpoint.model_names) == ("OpenAI", "/health", {"small": MODEL})


def test_a_pod_joins_once_it_is_ready():
    assert first(a_slice(a_pod(ready=False, serving=False))) == []


def test_a_pod_that_was_ready_stays_until_it_ends():
    assert first(a_slice(a_pod(ready=False, serving=False)), proven=frozenset({"pod-0"})) == [
        ("pod-0", "10.0.0.1:9000", False)
    ]


def test_terminating_pod_drains_unless_it_is_the_last():
    leaving = a_pod("leaving", "10.0.0.1", **TERMINATING)

    assert first(a_slice(leaving, a_pod("staying", "10.0.0.2"))) == [
        ("leaving", "10.0.0.1:9000", True),
        ("staying", "10.0.0.2:9000", False),
    ]
    assert first(a_slice(leaving, a_pod("starting", "10.0.0.2", ready=False, serving=False))) == [
        ("leaving", "10.0.0.1:9000", False)
    ]


def test_a_pod_in_two_slices_is_one():
    old = a_slice(a_pod(ready=False, serving=False), name="a")
    new = a_slice(a_pod(), name="b")

    assert first(old, new) == first(new, old) == [("pod-0", "10.0.0.1:9000", False)]


@pytest.mark.parametrize(
    "found",
    [
        a_slice(a_pod(), stage="unknown"),
        a_slice(a_pod(), variants=("unknown",)),
        {"metadata": {"name": "bare"}, "endpoints": [a_pod()], "ports": [{"port": 1}]},
        a_slice() | {"endpoints": None, "ports": None},
        a_slice({"addresses": [], "conditions": {}}),
    ],
)
def test_what_is_not_ours_is_passed_over(found):
    assert first(found) == []


def test_what_is_left_out_has_its_meaning():
    bare = {"addresses": ["fd00::1"], "conditions": {}}
    found = a_slice(bare, kind="IPv6") | {"ports": []}

    assert first(found) == [("fd00::1", "[fd00::1]:9000", False)]
