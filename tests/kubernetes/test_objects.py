"""Conditions, events, owners, timestamps and EndpointSlices as the API has them."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.builders import a_pipeline, a_pipeline_document, a_stage, a_variant
from tests.control_plane import TOKEN
from trimtab_adapter.cluster.router_metrics_source import Address, addresses
from trimtab_kubernetes import Cluster
from trimtab_kubernetes.conditions import MAX_MESSAGE, conditions, failing, ok
from trimtab_kubernetes.connection import read_json
from trimtab_kubernetes.endpoint_slices import Backend, parse_endpoint_slice
from trimtab_kubernetes.events import event
from trimtab_kubernetes.objects import MAX_LEVELS, owner_reference, parse_rfc3339, rfc3339, rfc3339_micro
from trimtab_pipelines.kubernetes_names import STAGE_LABEL, VARIANT_LABEL_PREFIX
from trimtab_router.watchers.endpoint_slices import ready_endpoints

NOW = 1_700_000_000.25
PIPELINE: dict[str, Any] = {
    "apiVersion": "trimtab.dev/v1alpha1",
    "kind": "InferencePipeline",
    "metadata": {"name": "sample", "namespace": "here", "uid": "u1"},
}


def test_transition_time_changes_with_the_status_only():
    (first,) = conditions([ok("Ready", "Fine", "")], [], 1, NOW)
    (same,) = conditions([ok("Ready", "Better", "")], [first], 2, NOW + 60)
    (other,) = conditions([failing("Ready", "Bad", "x" * 9999)], [same], 2, NOW + 90)

    assert first["lastTransitionTime"] == same["lastTransitionTime"] == rfc3339(NOW)
    assert (same["reason"], same["observedGeneration"]) == ("Better", 2)
    assert other["lastTransitionTime"] == rfc3339(NOW + 90)
    assert len(other["message"]) == MAX_MESSAGE


def event_of(about: dict[str, Any], decision: str, now_seconds: float = NOW) -> dict[str, Any]:
    return event(about, "PlanApplied", "why", decision=decision, by="operator", now_seconds=now_seconds)


def test_event_name_is_unique_per_decision():
    other = PIPELINE | {"metadata": PIPELINE["metadata"] | {"uid": "u2"}}
    names = [
        event_of(*about)["metadata"]["name"]
        for about in ((PIPELINE, "plan 1"), (PIPELINE, "plan 2"), (other, "plan 1"))
    ]

    assert event_of(PIPELINE, "plan 1", NOW + 5)["metadata"]["name"] == names[0]
    assert len(set(names)) == 3
    assert event_of(PIPELINE, "plan 1")["involvedObject"] == {
        "apiVersion": "trimtab.dev/v1alpha1",
        "kind": "InferencePipeline",
        "name": "sample",
        "namespace": "here",
        "uid": "u1",
    }


def test_owner_is_identified_by_its_uid():
    expected = {"apiVersion": "trimtab.dev/v1alpha1", "kind": "InferencePipeline", "name": "sample", "uid": "u1"}

    assert owner_reference(PIPELINE) == expected | {"controller": True}


def test_times_are_written_as_kubernetes_does():
    assert rfc3339(NOW) == "2023-11-14T22:13:20Z"
    assert rfc3339_micro(NOW) == "2023-11-14T22:13:20.250000Z"
    assert parse_rfc3339(rfc3339(NOW)) == int(NOW)


SERVED = a_pipeline([a_stage("first", variants=[a_variant("small")])])
LABELS = {STAGE_LABEL: "first", VARIANT_LABEL_PREFIX + "small": "true"}


def a_slice(address="10.0.0.1", conditions=None, **fields):
    endpoint = {"addresses": [address], "conditions": conditions, **fields}
    ports = [{"name": "none", "port": None}, {"name": "admin", "port": 8082}]
    return {"metadata": {"name": "one", "labels": LABELS}, "ports": ports, "endpoints": [endpoint]}


def backend(found) -> Backend:
    (only,) = parse_endpoint_slice(found).backends
    return only


READY, ENDING, DEAD = (True, True, False), (False, True, True), (False, False, True)


@pytest.mark.parametrize(
    ("conditions", "means", "joins", "drains", "queried"),
    [
        (None, READY, True, False, True),
        ({}, READY, True, False, True),
        ({"ready": None, "serving": None, "terminating": None}, READY, True, False, True),
        ({"ready": True, "serving": True, "terminating": False}, READY, True, False, True),
        ({"ready": False}, (False, False, False), False, False, False),
        ({"ready": False, "serving": True, "terminating": True}, ENDING, True, True, True),
        ({"ready": False, "serving": False, "terminating": True}, DEAD, False, False, False),
        ({"ready": False, "terminating": True}, DEAD, False, False, False),
    ],
)
def test_endpoint_conditions_are_interpreted_consistently(conditions, means, joins, drains, queried):
    found = a_slice(conditions=conditions, targetRef={"name": "pod-0"})
    one = backend(found)
    assert (one.name, (one.ready, one.serving, one.terminating)) == ("pod-0", means)

    other = a_slice("10.0.0.9", targetRef={"name": "pod-9"}) | {"metadata": {"name": "two", "labels": LABELS}}
    replicas = {each.name: each.draining for each in ready_endpoints([found, other], SERVED).stages["first"]}
    assert replicas == ({"pod-0": drains} if joins else {}) | {"pod-9": False}
    assert addresses([found]) == ([Address("http://10.0.0.1:8082", ready=means[0])] if queried else [])


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("fd00::1", "[fd00::1]"),
        ("::ffff:10.0.0.1", "[::ffff:10.0.0.1]"),
        ("fe80::1%eth0", "[fe80::1%eth0]"),
        ("node.example", "node.example"),
    ],
)
def test_ipv6_addresses_are_bracketed(address, host):
    found = a_slice(address)
    assert (backend(found).name, backend(found).host) == (address, host)
    assert ready_endpoints([found], SERVED).stages["first"][0].address == f"{host}:8082"
    assert addresses([found])[0].url == f"http://{host}:8082"


def test_absent_slice_fields_are_empty():
    found = parse_endpoint_slice({"metadata": {"name": "bare"}, "ports": None, "endpoints": [{"addresses": []}]})
    assert (found.labels, found.ports, found.backends) == ({}, {}, ())


@pytest.mark.parametrize(
    "deep", ['{"a": ' * 5000 + "1" + "}" * 5000, "[" * 5000 + "]" * 5000], ids=["objects", "lists"]
)
async def test_object_too_deep_to_read_leaves_others_whole(
    cluster: Cluster, namespace: str, kubeconfig: Path, deep: str
):
    await cluster.create(a_nested_pipeline(namespace, "plain", {"nodeName": "}]{"}), manager="tests")
    written = json.dumps(a_nested_pipeline(namespace, "deep", "DEEP")).replace('"DEEP"', deep)
    path = f"{server_of(kubeconfig)}/apis/trimtab.dev/v1alpha1/namespaces/{namespace}/inferencepipelines"
    async with httpx.AsyncClient(verify=False) as client:  # noqa: S501 - its certificate is made anew at each start
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        assert (await client.post(path, content=written, headers=headers)).status_code == 201

    first, second = (await cluster.list("InferencePipeline", namespace)).items

    assert first["metadata"]["name"] == "deep"
    assert depth_of(first) == MAX_LEVELS - 2  # the list and its items
    assert second["spec"]["stages"][0]["variants"][0]["podTemplate"]["spec"] == {"x": {"nodeName": "}]{"}}


def server_of(kubeconfig: Path) -> str:
    return str(yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]["server"])


def a_nested_pipeline(namespace: str, name: str, value: object) -> dict[str, Any]:
    document = a_pipeline_document([a_stage(variants=[a_variant("v")])])
    document["spec"]["stages"][0]["variants"][0]["podTemplate"] = {"spec": {"x": value}}
    return document | {"metadata": {"name": name, "namespace": namespace}}


def depth_of(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


def test_text_that_is_no_json_is_refused():
    with pytest.raises(ValueError, match="unexpected"):
        read_json(b'{"a": [1}')
