"""Pipelines and profiles with defaults, for tests of the profiler."""

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab_pipelines.documents import parse
from trimtab_pipelines.profile import Measurement, PointProfile
from trimtab_pipelines.spec import InferencePipeline
from trimtab_profiler.fit import fit_latency


def a_variant(name: str, cpu: str = "1", accuracy: float = 0.9, **more: Any) -> dict[str, Any]:
    """An echo."""
    echo = {"name": name, "family": "echo", "storageUri": "random://?seed=1", "accuracy": accuracy}
    return {**echo, "resources": {"cpu": cpu}, **more}


def a_pipeline(
    first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]] = (), annotations: Mapping[str, str] | None = None
) -> InferencePipeline:
    """One echo stage, or two."""
    stages: list[dict[str, Any]] = [
        {
            "name": "first",
            "inputs": [{"name": "x", "from": "request.inputs.x"}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1]}],
            "variants": list(first),
        }
    ]
    if second:
        stages.append(
            {
                "name": "second",
                "inputs": [{"name": "y", "from": "first.outputs.y"}],
                "outputs": [{"name": "z", "datatype": "FP32", "shape": [-1]}],
                "variants": list(second),
            }
        )
    content = {
        "apiVersion": "trimtab.dev/v1alpha1",
        "kind": "InferencePipeline",
        "metadata": {"name": "echoes", "annotations": dict(annotations or {})},
        "spec": {
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1]}],
            "outputs": [{"name": "out", "from": "second.outputs.z" if second else "first.outputs.y"}],
            "stages": stages,
            "slo": {"latency": "250ms"},
            "budget": {"cores": 64},
        },
    }
    return parse(InferencePipeline, content, "test")


def a_measurement(batch_size: int, p99: float, mean: float | None = None) -> Measurement:
    """Full batches back to back: throughput follows from the mean latency."""
    mean = p99 / 1.25 if mean is None else mean
    return Measurement(
        batch_size=batch_size,
        latency_seconds_mean=mean,
        latency_seconds_p50=mean,
        latency_seconds_p99=p99,
        throughput_rps=batch_size / mean,
        batches=100,
    )


def a_point(variant: str, cores: float, p99_by_batch: Mapping[int, float]) -> PointProfile:
    """A profile of the default operating point."""
    measurements = tuple(a_measurement(size, p99) for size, p99 in p99_by_batch.items())
    law = fit_latency([m.batch_size for m in measurements], [m.latency_seconds_mean for m in measurements])
    return PointProfile(variant=variant, cores=cores, measurements=measurements, fit=law)
