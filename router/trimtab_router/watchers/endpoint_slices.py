"""Which replicas a pipeline has, read from the EndpointSlices of its hosting sets. Pure.

A replica joins when the cluster first says that it is ready, which for our model servers means loaded and warmed. From
then on only its end or its absence takes it out: the router's own probes see sooner and surer whether it can serve than
the kubelet's, which fail on a busy node. Where all that is left of a stage is about to end, it serves until it does.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from trimtab_kubernetes.endpoint_slices import EndpointSlice, read_slice
from trimtab_kubernetes.objects import Object
from trimtab_pipelines.endpoints import Endpoint, Endpoints
from trimtab_pipelines.kubernetes_names import DATA_PORT, STAGE_LABEL, VARIANT_LABEL_PREFIX
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Stage


@dataclass(frozen=True, slots=True)
class _SeenEndpoint:
    """One replica in one slice."""

    endpoint: Endpoint
    ready: bool
    terminating: bool


def endpoints_of(
    slices: Iterable[Object], pipeline: InferencePipeline, proven: frozenset[str] = frozenset()
) -> Endpoints:
    """The replicas that may serve, by stage.

    Args:
        slices: the pipeline's EndpointSlices; of several Services, and several of one.
        pipeline: what its stages and variants are; labels that name others are passed over.
        proven: names of replicas that were ready before.
    """
    sightings: dict[str, dict[str, _SeenEndpoint]] = {stage.name: {} for stage in pipeline.spec.stages}
    for found in sorted(map(read_slice, slices), key=lambda each: each.name):
        name = found.labels.get(STAGE_LABEL)
        stage = next((stage for stage in pipeline.spec.stages if stage.name == name), None)
        if stage is not None:
            for seen in _sightings(found, stage):
                known = sightings[stage.name].get(seen.endpoint.name)
                if known is None or _rank(seen) > _rank(known):
                    sightings[stage.name][seen.endpoint.name] = seen
    return Endpoints(stages={name: _usable(seen.values(), proven) for name, seen in sightings.items()})


def names_of(endpoints: Endpoints) -> frozenset[str]:
    """The names of all replicas."""
    return frozenset(endpoint.name for stage in endpoints.stages.values() for endpoint in stage)


def _rank(seen: _SeenEndpoint) -> tuple[bool, bool]:
    """A replica may stand in two slices while it moves from one to the other; the better news is the newer."""
    return seen.ready, not seen.terminating


def _usable(seen: Iterable[_SeenEndpoint], proven: frozenset[str]) -> tuple[Endpoint, ...]:
    usable = [each for each in seen if each.ready or each.endpoint.name in proven]
    last_ones = all(each.terminating for each in usable)
    return tuple(
        each.endpoint.model_copy(update={"draining": each.terminating and not last_ones})
        for each in sorted(usable, key=lambda each: each.endpoint.name)
    )


def _sightings(found: EndpointSlice, stage: Stage) -> Iterable[_SeenEndpoint]:
    variants = _variants(found, stage)
    if not variants:
        return
    found_in = {name: stage.variant(name).container for name in variants}
    theirs = {name: container for name, container in found_in.items() if container is not None}
    model_names = {name: container.model_name or name for name, container in theirs.items()}
    chats = next((container for container in theirs.values() if container.chats), None)
    port = next(iter(found.ports.values()), DATA_PORT)
    for each in found.backends:
        yield _SeenEndpoint(
            Endpoint(
                name=each.name,
                address=f"{each.host}:{port}",
                variants=variants,
                model_names=model_names,
                wire="OpenAI" if chats else "HTTP",
                ready_path=chats.ready_path if chats else None,
            ),
            ready=each.serving if each.terminating else each.ready,
            terminating=each.terminating,
        )


def _variants(found: EndpointSlice, stage: Stage) -> tuple[str, ...]:
    return tuple(
        variant.name for variant in stage.variants if found.labels.get(VARIANT_LABEL_PREFIX + variant.name) == "true"
    )
