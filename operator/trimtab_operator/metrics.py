"""Prometheus metrics of the operator."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from trimtab_kubernetes.objects import Object
from trimtab_operator.reconciliation.observed_state import desired_replicas
from trimtab_pipelines.flavors import DEFAULT_NAME
from trimtab_pipelines.kubernetes_names import FLAVOR_LABEL, REPLICA_GROUP_LABEL, STAGE_LABEL
from trimtab_pipelines.rollout import ReplicaGroupState

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_PIPELINE = ("namespace", "pipeline")


class Metrics:
    """The operator's metrics; series of a deleted pipeline are removed."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        gauge, counter = partial(Gauge, registry=self.registry), partial(Counter, registry=self.registry)
        text = "Replicas of a replica group: desired, ready, pending without a node, or on a node that is about to go"
        self._replicas = gauge("trimtab_replicas", text, (*_PIPELINE, "stage", "replica_group", "state"))
        self._cores = gauge("trimtab_allocated_cores", "Cores requested by all existing replicas", _PIPELINE)
        text = "Devices requested by all existing replicas, by resource flavor"
        self._devices = gauge("trimtab_allocated_devices", text, (*_PIPELINE, "flavor"))
        text = "1 for the current status of a condition"
        self._conditions = gauge("trimtab_condition", text, (*_PIPELINE, "type", "status"))
        self.seconds = Histogram(
            "trimtab_reconcile_seconds", "Time to reconcile one pipeline", buckets=_BUCKETS, registry=self.registry
        )
        self.outcomes = counter("trimtab_reconciles_total", "Reconciliations, by outcome", ("outcome",))
        self.writes = counter("trimtab_api_writes_total", "Writes to the API server, by kind", ("kind",))
        text = "Writes that were rejected, or that would have changed another owner's object"
        self.refusals = counter("trimtab_write_refusals_total", text, ("kind", "reason"))
        self._shown: dict[tuple[str, str], set[tuple[Gauge, tuple[str, ...]]]] = {}

    def show(
        self, key: tuple[str, str], sets: Sequence[tuple[ReplicaGroupState, Object]], status: Mapping[str, Any]
    ) -> None:
        """Set one pipeline's series and remove outdated ones."""
        values: dict[tuple[Gauge, tuple[str, ...]], float] = {}
        for each, found in sets:
            labels = found["metadata"]["labels"]
            where = (*key, labels[STAGE_LABEL], labels[REPLICA_GROUP_LABEL])
            values[self._replicas, (*where, "desired")] = desired_replicas(found)
            values[self._replicas, (*where, "ready")] = each.ready
            values[self._replicas, (*where, "pending")] = each.unscheduled
            values[self._replicas, (*where, "leaving")] = each.leaving
            devices = self._devices, (*key, labels.get(FLAVOR_LABEL, DEFAULT_NAME))
            values[devices] = values.get(devices, 0.0) + each.requested.gpus
        if status:
            values[self._cores, key] = float(status.get("cores", 0))
        for condition in status.get("conditions", []):
            for state in ("True", "False", "Unknown"):
                values[self._conditions, (*key, condition["type"], state)] = float(condition["status"] == state)
        for (gauge, labels), value in values.items():
            gauge.labels(*labels).set(value)
        for gauge, labels in self._shown.get(key, set()) - values.keys():
            gauge.remove(*labels)
        self._shown[key] = set(values)

    def forget(self, key: tuple[str, str]) -> None:
        self.show(key, (), {})
        self._shown.pop(key, None)
