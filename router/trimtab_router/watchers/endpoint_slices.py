"""Replicas of a pipeline, read from the EndpointSlices of its replica sets.

A replica is added when the cluster first reports it ready: our model servers are then loaded and warmed up. After that
only its termination or absence removes it: the router's own probes detect failures sooner and more reliably than the
kubelet's, which fail on a busy node. If all remaining replicas of a stage are terminating, they serve until they end.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from trimtab_kubernetes.endpoint_slices import EndpointSlice, parse_endpoint_slice
from trimtab_kubernetes.objects import Object
from trimtab_pipelines.endpoints import Endpoint, Endpoints, container_fields
from trimtab_pipelines.kubernetes_names import DATA_PORT, STAGE_LABEL, VARIANT_LABEL_PREFIX
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage


@dataclass(frozen=True, slots=True)
class _SeenEndpoint:
    """One replica in one slice."""

    endpoint: Endpoint
    ready: bool
    terminating: bool


def ready_endpoints(
    slices: Iterable[Object], pipeline: InferencePipeline, proven: frozenset[str] = frozenset()
) -> Endpoints:
    """Replicas that may serve, by stage. `proven`: names of replicas that were ready before."""
    endpoints_by_stage: dict[str, dict[str, _SeenEndpoint]] = {stage.name: {} for stage in pipeline.spec.stages}
    for slice_ in sorted(map(parse_endpoint_slice, slices), key=lambda backend: backend.name):
        name = slice_.labels.get(STAGE_LABEL)
        stage = next((stage for stage in pipeline.spec.stages if stage.name == name), None)
        if stage is not None:
            for entry in _slice_endpoints(slice_, stage):
                existing = endpoints_by_stage[stage.name].get(entry.endpoint.name)
                if existing is None or _rank(entry) > _rank(existing):
                    endpoints_by_stage[stage.name][entry.endpoint.name] = entry
    return Endpoints(stages={name: _usable(entry.values(), proven) for name, entry in endpoints_by_stage.items()})


def endpoint_names(endpoints: Endpoints) -> frozenset[str]:
    return frozenset(endpoint.name for stage in endpoints.stages.values() for endpoint in stage)


def _rank(entry: _SeenEndpoint) -> tuple[bool, bool]:
    """Preference among entries of a replica that moves between slices: ready first, then not terminating."""
    return entry.ready, not entry.terminating


def _usable(entry: Iterable[_SeenEndpoint], proven: frozenset[str]) -> tuple[Endpoint, ...]:
    usable = [backend for backend in entry if backend.ready or backend.endpoint.name in proven]
    last_ones = all(backend.terminating for backend in usable)
    return tuple(
        backend.endpoint.replace(draining=backend.terminating and not last_ones)
        for backend in sorted(usable, key=lambda backend: backend.endpoint.name)
    )


def _slice_endpoints(slice_: EndpointSlice, stage: Stage) -> Iterable[_SeenEndpoint]:
    variants = _variants(slice_, stage)
    if not variants:
        return
    containers_by_variant = {name: stage.variant(name).container for name in variants}
    containers = {name: container for name, container in containers_by_variant.items() if container is not None}
    port = next(iter(slice_.ports.values()), DATA_PORT)
    for backend in slice_.backends:
        yield _SeenEndpoint(
            Endpoint(
                name=backend.name,
                address=f"{backend.host}:{port}",
                variants=variants,
                **container_fields(containers),
            ),
            ready=backend.serving if backend.terminating else backend.ready,
            terminating=backend.terminating,
        )


def _variants(slice_: EndpointSlice, stage: Stage) -> tuple[str, ...]:
    return tuple(
        variant.name for variant in stage.variants if slice_.labels.get(VARIANT_LABEL_PREFIX + variant.name) == "true"
    )
