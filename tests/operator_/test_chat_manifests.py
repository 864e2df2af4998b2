"""Manifests of chat replicas: model servers, which Prometheus scrapes, and third-party engines."""

import re
from typing import Any

import pytest

from tests.builders import a_pipeline
from tests.operator_.scene import SETTINGS
from tests.router.chats import a_chat_pipeline
from tests.router.engines import an_engine_pipeline
from trimtab_operator.manifests.replica_groups import replica_group, replica_monitors, service
from trimtab_operator.reconcile import reconcile
from trimtab_operator.reconciliation.observed_state import ObservedState
from trimtab_pipelines.replica_groups import replica_groups
from trimtab_pipelines.spec import InferencePipeline


def engine() -> list[dict[str, Any]]:
    """What runs an engine of others as the text pool of a pipeline that answers chats."""
    document = an_engine_pipeline().model_dump(mode="json", by_alias=True, exclude_none=True)
    document["metadata"] |= {"namespace": "team", "uid": "1234"}
    pipeline = InferencePipeline.model_validate(document)
    (stage,) = pipeline.spec.stages
    (group,) = replica_groups(stage)
    return [
        replica_group(pipeline, stage, group, SETTINGS, replicas=1, surge=True),
        service(pipeline, stage, group, SETTINGS),
    ]


def chatting() -> list[dict[str, Any]]:
    """What runs a model of ours that answers chats, and whom Prometheus scrapes."""
    document = a_chat_pipeline().model_dump(mode="json", by_alias=True, exclude_none=True)
    document["metadata"] |= {"namespace": "team", "uid": "1234"}
    pipeline = InferencePipeline.model_validate(document)
    (stage,) = pipeline.spec.stages
    (group,) = replica_groups(stage)
    return [replica_group(pipeline, stage, group, SETTINGS, replicas=1, surge=True), *replica_monitors(pipeline)]


def test_pod_monitor_selects_the_metrics_port_of_the_pods() -> None:
    made, monitor = chatting()
    pods = made["spec"]["template"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    named = {port["name"]: port["containerPort"] for port in pods["spec"]["containers"][0]["ports"]}
    arguments = pods["spec"]["containers"][0]["args"]

    assert arguments[arguments.index("--metrics-port") + 1] == str(named[endpoint["port"]])
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pods["metadata"]["labels"].items()
    borne = {"__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", label) for label in pods["metadata"]["labels"]}
    taken = {each["targetLabel"]: each["sourceLabels"][0] for each in endpoint["relabelings"]}
    assert taken.pop("namespace") == "__meta_kubernetes_namespace"
    assert (set(taken), set(taken.values()) - borne) == ({"pipeline", "stage"}, set())
    assert replica_monitors(a_pipeline()) == []


@pytest.mark.parametrize("kinds", [frozenset(), frozenset({"PodMonitor"})], ids=["not scraped", "scraped"])
def test_chat_replicas_are_scraped_if_routers_are(kinds: frozenset[str]) -> None:
    document = a_chat_pipeline().model_dump(mode="json", by_alias=True, exclude_none=True)
    document["metadata"] |= {"namespace": "team", "uid": "1234", "generation": 1}
    written = reconcile(ObservedState(document, kinds=kinds), SETTINGS, 0.0).apply
    scraped = {one["metadata"]["name"] for one in written if one["kind"] == "PodMonitor"}

    assert scraped == ({"sample-router", "sample-router-only"} if kinds else set())
