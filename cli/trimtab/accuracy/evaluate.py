"""Evaluation of a pipeline: serves one choice of variants after the other, and sends all samples to each."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.accuracy.attribution import Choice, ReceivedAnswer, choices
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_loadtester.clients import RestClient
from trimtab_loadtester.payloads.interface import Outputs
from trimtab_loadtester.payloads.labelled import LabelledPayloads, SamplesError, agreement
from trimtab_pipelines.documents import dump_yaml, write_atomically, write_json
from trimtab_pipelines.plan import PipelinePlan, PipelinePlanSpec, StagePlan
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.resource import Metadata
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol.extensions import parameters_of

TIMEOUT_SECONDS = 600.0
"""Timeout of a request, and of a plan to be in force."""
MAX_BATCH_SIZE = 8
CONCURRENCY = 16
_POLL_SECONDS = 0.05
OnProgress = Callable[[int, str], None]
"""Called for each answer with the number of choices, and a description of the current one."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A pipeline to evaluate, and the samples."""

    pipeline: InferencePipeline
    home: Path
    """Base of relative paths."""
    samples: LabelledPayloads
    count: int
    """Number of samples to send."""


async def evaluate(
    evaluation: Evaluation, folder: Path, on_progress: OnProgress
) -> dict[Choice, Sequence[ReceivedAnswer]]:
    """Serve the pipeline in a folder; return the answers to the samples with each choice, in the samples' order.

    Without labels, the score of an answer is its agreement with that of the best choice by declared accuracies.
    Raises StartError if a process did not start, or a request failed.
    """
    pipeline = without_deadlines(evaluation.pipeline)
    pipeline_file = folder / "measured" / "pipeline.yaml"
    write_atomically(pipeline_file, dump_yaml(pipeline))
    pipeline_choices = choices(pipeline)
    first = single_choice_plan(pipeline, pipeline_choices[0], 1)
    answers: dict[Choice, Sequence[ReceivedAnswer]] = {}
    async with Supervisor(
        Setup(pipeline_file, folder / "run", None, first, proxy=False, home=evaluation.home)
    ) as supervisor:
        await supervisor.ready(TIMEOUT_SECONDS)
        for number, choice in enumerate(pipeline_choices, 1):
            write_json(supervisor.plan_file, single_choice_plan(pipeline, choice, number))
            await _wait_for_plan(supervisor, choice, number)
            on_answer = partial(on_progress, len(pipeline_choices))
            best = None if evaluation.samples.labelled else answers.get(pipeline_choices[0], ())
            answers[choice] = await _send(evaluation, supervisor.rest_port, choice, on_answer, best)
            supervisor.raise_failure()
    return answers


def without_deadlines(pipeline: InferencePipeline) -> InferencePipeline:
    """Return the pipeline without drops by deadline, and with a budget for a change of variants."""
    cores = sum(max(variant.resources.cpu for variant in stage.variants) for stage in pipeline.spec.stages)
    document: dict[str, Any] = pipeline.model_dump(mode="json", by_alias=True, exclude_none=True)
    document["spec"] |= {
        "slo": {"latency": f"{TIMEOUT_SECONDS:g}s"},
        "budget": {"cores": cores, "surgeCores": cores},
        "dropPolicy": "Never",
        "schedulingPolicy": "EarliestDeadlineFirst",
    }
    return InferencePipeline.model_validate(document)


def single_choice_plan(pipeline: InferencePipeline, choice: Choice, generation: int) -> PipelinePlan:
    stages = []
    for stage, (name, point) in zip(pipeline.spec.ordered_stages, choice, strict=True):
        variant = stage.variant(name)
        stages.append(
            StagePlan(
                name=stage.name,
                variant=name,
                operating_point=point,
                batch_size=max(size for size in (1, *stage.batch_sizes) if size <= MAX_BATCH_SIZE),
                replicas=1,
                cores=variant.resources.cpu,
                accuracy=variant.point(point).accuracy,
                inputs=variant.point(point).modalities,
            )
        )
    spec = PipelinePlanSpec(pipeline=pipeline.name, generation=generation, created_at=0.0, stages=tuple(stages))
    return PipelinePlan(metadata=Metadata(name=pipeline.name), spec=spec)


def _results(pipeline: InferencePipeline, outputs: Outputs) -> Outputs:
    """The outputs of a pipeline except confidences."""
    confidences = {f"{stage.name}.outputs.{stage.confidence}" for stage in pipeline.spec.stages}
    return {each.name: outputs[each.name] for each in pipeline.spec.outputs if each.source not in confidences}


async def _wait_for_plan(supervisor: Supervisor, choice: Choice, generation: int) -> None:
    """Wait until the router serves the plan, and only its replicas exist."""
    stages = [stage.name for stage in supervisor.pipeline.spec.ordered_stages]
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while not _serves(supervisor, dict(zip(stages, choice, strict=True)), generation):
                supervisor.raise_failure()
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise StartError(f"the plan with {choice} was not in force within {TIMEOUT_SECONDS:g} s") from None


def _serves(supervisor: Supervisor, points: Mapping[str, tuple[str, str]], generation: int) -> bool:
    state = supervisor.state
    if state is None or not state.ready or state.plan_generation != generation:
        return False
    if not supervisor.replica_manager.settled:
        return False
    return {name: (stage.variant, stage.operating_point) for name, stage in state.stages.items()} == points


async def _send(
    evaluation: Evaluation,
    port: int,
    choice: Choice,
    on_progress: Callable[[str], None],
    reference: Sequence[ReceivedAnswer] | None,
) -> Sequence[ReceivedAnswer]:
    """Send every sample with limited concurrency; each must be answered by the choice.

    `reference`: for samples without labels, the answers of the best choice; empty for the best choice itself.
    """
    samples, answers = evaluation.samples, dict[int, ReceivedAnswer]()
    outputs = tuple(output.name for output in evaluation.pipeline.spec.outputs)
    parameters = {stage.name: parameters_of(stage.name) for stage in evaluation.pipeline.spec.ordered_stages}
    expected = dict(zip(parameters.values(), choice, strict=True))
    slots, description = asyncio.Semaphore(CONCURRENCY), ", ".join(f"{v} {p}" for v, p in choice)

    async def send_sample(number: int) -> None:
        payload = samples.payload(number)
        request = client.encode(payload.inputs, outputs, {"timeout": round(TIMEOUT_SECONDS * 1e6)})
        answer = await client.send(request, f"sample-{number}")
        slots.release()
        if answer.message is None:
            raise StartError(f"sample {number} with {description}: {answer.code} {answer.detail}")
        values = answer.message.parameters
        for names, (variant, point) in expected.items():
            served = values.get(names.variant, variant), values.get(names.operating_point, point)
            if served != (variant, point):
                raise StartError(f"sample {number} was served by {served[0]}, not by {variant} {point}")
        arrays = {tensor.name: tensor.array for tensor in answer.message.outputs}
        try:
            confidences = {
                stage: str(values.get(names.confidences, ""))
                for stage, names in parameters.items()
                if names.variant in values  # it got rows of this sample
            }
            if reference is None:
                score = samples.score(payload.truth, arrays)
            else:
                first = reference[number].outputs if reference else arrays
                score = agreement(_results(evaluation.pipeline, first), arrays)
            truth = payload.truth if isinstance(payload.truth, dict) else {}
            answers[number] = ReceivedAnswer(score, confidences, samples.task(number), truth, arrays)
        except (KeyError, ValueError, TypeError) as error:
            raise SamplesError(f"sample {number}: its answer cannot be scored: {error!r}") from error
        on_progress(description)

    try:
        async with RestClient(f"127.0.0.1:{port}", evaluation.pipeline.name) as client, asyncio.TaskGroup() as group:
            for number in range(evaluation.count):
                await slots.acquire()
                group.create_task(send_sample(number))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [answers[number] for number in range(evaluation.count)]
