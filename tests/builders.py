"""Builders of the smallest valid documents, with parts that a test may replace."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ChatProfile, LatencyCurve, LatencyFit, Measurement, ModelProfile, PointProfile
from trimtab_pipelines.spec import InferencePipeline
from trimtab_profiler.fit import fit_latency

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


def a_variant(name: str = "small", **changes: Any) -> dict[str, Any]:
    return {"name": name, "family": "echo", "storageUri": "random://?seed=1", "accuracy": 0.9} | changes


def a_stage(name: str = "first", source: str = "request.inputs.x", **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "inputs": [{"name": "x", "from": source}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [4]}],
        "variants": [a_variant()],
    } | changes


def a_chain(stages: int) -> list[dict[str, Any]]:
    """Stages that each read the one before."""
    names = [f"stage-{n}" for n in range(stages)]
    sources = ["request.inputs.x", *(f"{name}.outputs.y" for name in names)]
    return [a_stage(name, source) for name, source in zip(names, sources, strict=False)]


def a_pipeline_document(stages: Sequence[dict[str, Any]] | int = 1, **changes: Any) -> dict[str, Any]:
    """A pipeline as a user would write it."""
    listed = a_chain(stages) if isinstance(stages, int) else list(stages)
    spec = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [4]}],
        "outputs": [{"name": "y", "from": f"{listed[-1]['name']}.outputs.y"}],
        "stages": listed,
        "slo": {"latency": "500ms"},
        "budget": {"cores": "8"},
        "schedulingPolicy": "EarliestDeadlineFirst",
    } | changes
    return {
        "apiVersion": "trimtab.dev/v1alpha1",
        "kind": "InferencePipeline",
        "metadata": {"name": "sample"},
        "spec": spec,
    }


def a_pipeline(stages: Sequence[dict[str, Any]] | int = 1, **changes: Any) -> InferencePipeline:
    return InferencePipeline.model_validate(a_pipeline_document(stages, **changes))


def an_echo_pipeline(*stages: Sequence[dict[str, Any]], annotations: dict[str, str] | None = None) -> InferencePipeline:
    """One stage or two of these variants, whose tensors have any length."""
    outputs = [{"name": "y", "datatype": "FP32", "shape": [-1]}]
    sources = (("first", "request.inputs.x"), ("second", "first.outputs.y"))
    chain = [
        a_stage(*named, outputs=outputs, variants=list(variants))
        for named, variants in zip(sources, stages, strict=False)
    ]
    document = a_pipeline_document(chain, inputs=[{"name": "x", "datatype": "FP32", "shape": [-1]}])
    document["metadata"] = {"name": "echoes", "annotations": annotations or {}}
    return InferencePipeline.model_validate(document)


def a_point_profile(
    variant: str = "small",
    constant_seconds: float = 0.004,
    linear_seconds: float = 0.002,
    cores: float = 1.0,
    point: str = "default",
) -> PointProfile:
    """A profile that follows constant + linear × batch exactly."""
    fit = LatencyFit(quadratic=0, linear=linear_seconds, constant=constant_seconds, mean_relative_error=0)
    measurements = tuple(a_measurement(size, fit.seconds(size), 1.0) for size in BATCH_SIZES)
    return PointProfile(variant=variant, operating_point=point, cores=cores, measurements=measurements, fit=fit)


def point_profiles(laws: Mapping[str, tuple[float, float]], variant: str = "small") -> list[PointProfile]:
    """Profiles of operating points that take constant + linear × batch, by name."""
    return [a_point_profile(variant, *law, point=name) for name, law in laws.items()]


def a_measurement(batch_size: int, seconds: float, p99_ratio: float = 1.2) -> Measurement:
    """Full batches back to back: throughput follows from the mean latency."""
    return Measurement(
        batch_size=batch_size,
        latency_seconds_mean=seconds,
        latency_seconds_p50=seconds,
        latency_seconds_p99=p99_ratio * seconds,
        throughput_rps=batch_size / seconds,
        batches=100,
    )


def a_measured_profile(seconds_by_size: dict[int, float], variant: str = "small", cores: float = 1.0) -> PointProfile:
    """A profile of these mean seconds by batch size, p99 a fifth above, with the law that is fitted to them."""
    measurements = tuple(a_measurement(size, seconds) for size, seconds in seconds_by_size.items())
    fit = fit_latency(list(seconds_by_size), list(seconds_by_size.values()))
    return PointProfile(variant=variant, cores=cores, measurements=measurements, fit=fit)


def a_profile(stage: str, points: Sequence[PointProfile], pipeline: str = "sample") -> ModelProfile:
    return ModelProfile.model_validate(
        {
            "metadata": {"name": f"{pipeline}-{stage}"},
            "spec": {
                "pipeline": pipeline,
                "stage": stage,
                "hardware": {"processor": "test", "nodeCores": 2},
                "points": [point.model_dump() for point in points],
            },
        }
    )


def a_chat_point(variant: str, *laws: tuple[float, float], tokens: float) -> PointProfile:
    """A profile of chats by (constant, linear) seconds.

    The laws are of whole answers and of first tokens with one image, then of both without images.
    """
    whole, *parts = (a_point_profile(variant, *law) for law in laws)
    first, text, text_first = (LatencyCurve(measurements=part.measurements, fit=part.fit) for part in parts)
    chats = ChatProfile(
        time_to_first_token=first, text_only=text, text_only_time_to_first_token=text_first, tokens=tokens
    )
    return whole.replace(chats=chats)


def a_body(resource: BaseModel, name: str = "", namespace: str = "", **metadata: Any) -> dict[str, Any]:
    """A resource as it is applied; `name` replaces its own."""
    body: dict[str, Any] = resource.model_dump(mode="json", by_alias=True, exclude_none=True)
    named = {"name": name or body["metadata"]["name"], "namespace": namespace or body["metadata"]["namespace"]}
    return body | {"metadata": named | metadata}


def a_plan(pipeline: InferencePipeline, generation: int = 1, **changes: Any) -> PipelinePlan:
    """A plan that runs each stage's first variant once; `changes` apply to every stage."""
    stages = [
        {
            "name": stage.name,
            "variant": stage.variants[0].name,
            "batchSize": 8,
            "replicas": 1,
            "accuracy": stage.variants[0].accuracy,
        }
        | changes
        for stage in pipeline.spec.stages
    ]
    return PipelinePlan.model_validate(
        {
            "metadata": {"name": pipeline.name},
            "spec": {"pipeline": pipeline.name, "generation": generation, "createdAt": 0.0, "stages": stages},
        }
    )
