"""Shell: sends all samples through the pipeline, served as `trimtab up` serves it, one choice after the other."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.accuracy.attribution import Choice, ReceivedAnswer, choices
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_loadtester.clients import RestClient
from trimtab_loadtester.payloads.labelled import LabelledPayloads, SamplesError
from trimtab_pipelines.documents import dump_yaml, write_atomically, write_json
from trimtab_pipelines.model_spec import resolve_uri
from trimtab_pipelines.plan import PipelinePlan, PipelinePlanSpec, StagePlan
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.resource import Metadata
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol.extensions import parameters_of

PATIENCE_SECONDS = 600.0
"""For one answer, and for a plan to be in force."""
MOST_BATCH_SIZE = 8
AT_ONCE = 16
_POLL_SECONDS = 0.05
OnProgress = Callable[[int, str], None]
"""Called for each answer: how many choices there are, and which this one is of."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is measured: the pipeline, the folder its weights are named from, samples, and how many of them."""

    pipeline: InferencePipeline
    home: Path
    samples: LabelledPayloads
    count: int


async def evaluate(order: Evaluation, folder: Path, on_progress: OnProgress) -> dict[Choice, Sequence[ReceivedAnswer]]:
    """Serve the pipeline in a folder and return what came of each sample with each choice, in the samples' order.

    Raises:
        StartError: something did not come up, or a sample got no answer.
    """
    measured = without_deadlines(order.pipeline, order.home)
    pipeline_file = folder / "measured" / "pipeline.yaml"
    write_atomically(pipeline_file, dump_yaml(measured))
    tried = choices(measured)
    first = plan_of(measured, tried[0], 1)
    heard: dict[Choice, Sequence[ReceivedAnswer]] = {}
    async with Supervisor(Setup(pipeline_file, folder / "run", None, first, proxy=False)) as local:
        await local.ready(PATIENCE_SECONDS)
        for number, choice in enumerate(tried, 1):
            write_json(local.plan_file, plan_of(measured, choice, number))
            await _in_force(local, choice, number)
            heard[choice] = await _send(order, local.rest_port, choice, partial(on_progress, len(tried)))
            local.raise_failure()
    return heard


def without_deadlines(pipeline: InferencePipeline, home: Path) -> InferencePipeline:
    """Return the pipeline as it is measured: nothing is dropped for its deadline, and there is room for a change."""
    cores = sum(max(variant.resources.cpu for variant in stage.variants) for stage in pipeline.spec.stages)
    document: dict[str, Any] = pipeline.model_dump(mode="json", by_alias=True, exclude_none=True)
    document["spec"] |= {
        "slo": {"latency": f"{PATIENCE_SECONDS:g}s"},
        "budget": {"cores": cores, "surgeCores": cores},
        "dropPolicy": "Never",
        "schedulingPolicy": "EarliestDeadlineFirst",
    }
    for stage in document["spec"]["stages"]:
        for variant in stage["variants"]:
            variant["storageUri"] = resolve_uri(variant["storageUri"], home)
    return InferencePipeline.model_validate(document)


def plan_of(pipeline: InferencePipeline, choice: Choice, generation: int) -> PipelinePlan:
    """Return the plan that runs a choice, one replica a stage."""
    stages = []
    for stage, (name, point) in zip(pipeline.spec.ordered_stages, choice, strict=True):
        variant = stage.variant(name)
        stages.append(
            StagePlan(
                name=stage.name,
                variant=name,
                operating_point=point,
                batch_size=max(size for size in (1, *stage.batch_sizes) if size <= MOST_BATCH_SIZE),
                replicas=1,
                cores=variant.resources.cpu,
                accuracy=variant.point(point).accuracy,
                inputs=variant.point(point).modalities,
            )
        )
    spec = PipelinePlanSpec(pipeline=pipeline.name, generation=generation, created_at=0.0, stages=tuple(stages))
    return PipelinePlan(metadata=Metadata(name=pipeline.name), spec=spec)


async def _in_force(local: Supervisor, choice: Choice, generation: int) -> None:
    """Wait until the router serves a plan with replicas of it alone."""
    order = [stage.name for stage in local.pipeline.spec.ordered_stages]
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not _serves(local, dict(zip(order, choice, strict=True)), generation):
                local.raise_failure()
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise StartError(f"the plan with {choice} was not in force within {PATIENCE_SECONDS:g} s") from None


def _serves(local: Supervisor, wanted: Mapping[str, tuple[str, str]], generation: int) -> bool:
    state = local.state
    if state is None or not state.ready or state.plan_generation != generation or not local.replica_manager.settled:
        return False
    running = {name: (stage.variant, stage.operating_point) for name, stage in state.stages.items()}
    return running == wanted


async def _send(
    order: Evaluation, port: int, choice: Choice, on_progress: Callable[[str], None]
) -> Sequence[ReceivedAnswer]:
    """Send every sample, a few at once; each answer must come from the choice."""
    heard: dict[int, ReceivedAnswer] = {}
    outputs = tuple(output.name for output in order.pipeline.spec.outputs)
    parameters = {stage.name: parameters_of(stage.name) for stage in order.pipeline.spec.ordered_stages}
    served_by = dict(zip(parameters.values(), choice, strict=True))
    room, words = asyncio.Semaphore(AT_ONCE), ", ".join(f"{v} {p}" for v, p in choice)

    async def one(number: int) -> None:
        payload = order.samples.payload(number)
        encoded = wire.encode(payload.inputs, outputs, {"timeout": round(PATIENCE_SECONDS * 1e6)})
        answer = await wire.send(encoded, f"sample-{number}")
        room.release()
        if answer.response is None:
            raise StartError(f"sample {number} with {words}: {answer.code} {answer.detail}")
        told = answer.response.parameters
        for named, (variant, point) in served_by.items():
            if (told.get(named.variant, variant), told.get(named.operating_point, point)) != (variant, point):
                raise StartError(f"sample {number} was served by {told.get(named.variant)}, not by {variant} {point}")
        found, task = {tensor.name: tensor.array for tensor in answer.response.outputs}, order.samples.task(number)
        try:
            confidences = {stage: str(told.get(named.confidences, "")) for stage, named in parameters.items()}
            score = order.samples.score(payload.truth, found)
            heard[number] = ReceivedAnswer(score, confidences, task)
        except (KeyError, ValueError, TypeError) as error:
            raise SamplesError(f"sample {number}: its answer cannot be scored: {error!r}") from error
        on_progress(words)

    try:
        async with RestClient(f"127.0.0.1:{port}", order.pipeline.name) as wire, asyncio.TaskGroup() as group:
            for number in range(order.count):
                await room.acquire()
                group.create_task(one(number))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [heard[number] for number in range(order.count)]
