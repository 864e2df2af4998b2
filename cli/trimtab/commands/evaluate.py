"""`trimtab evaluate`: measures the accuracy of variants and operating points on samples."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from trimtab.accuracy.attribution import (
    PointKey,
    accuracies,
    escalations,
    mean_confidences,
    output_shares,
    task_accuracies,
    task_accuracy_stages,
)
from trimtab.accuracy.evaluate import Evaluation, evaluate
from trimtab.accuracy.metrics import ACCURACY, metric_of, tally
from trimtab.local.profile_cache import find_profile
from trimtab.options import (
    SAMPLES_METAVAR,
    EditedPipelineOption,
    MaxSamplesOption,
    PipelineArgument,
    SeedOption,
    console,
    terminal_table,
)
from trimtab.preflight import counting_progress, prepare, write_edited
from trimtab.run_folder import RunFolder
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_pipelines.accuracy_evidence import AGREEMENT, Accuracy
from trimtab_pipelines.documents import load_profiles, pipeline_file, pipeline_folder
from trimtab_pipelines.result_line import ResultLine
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.yaml_edit import with_accuracies, with_escalations
from trimtab_profiler.identity import model_identity

COLUMNS = ("stage", "variant", "point", "task", "before", "measured", "95 % interval", "confidence")


def command(
    pipeline: PipelineArgument,
    samples: Annotated[str, typer.Option("--samples", metavar=SAMPLES_METAVAR, help="Samples, with or without labels")],
    max_samples: MaxSamplesOption = None,
    seed: SeedOption = 0,
    out: EditedPipelineOption = None,
) -> int:
    """Measure the accuracy of every variant and operating point on samples; write it into the pipeline.

    Each variant of a pipeline of several stages is measured with the best variants of the other stages. A stage that
    outputs a confidence also gets its mean confidence, from which the router detects drift. If the samples name their
    tasks, accuracies and mean confidences are also written by task. A stage with a confidence, and one row or a score
    of each row for each sample, also gets escalations: the accuracy gained if a more accurate point or variant repeats
    the least confident rows. Those that another option of the stage dominates are left out.

    Without labels, the share of results that agree with those of the variants with the highest accuracies replaces
    accuracies. It is marked as agreement.

    The metric follows from the family that gives the outputs (ROUGE-L for hf/summarization), or from the annotation
    trimtab.dev/metric; by default it is the share of correct answers.
    """
    document = prepare(pipeline)
    source = LabelledPayloads(document, samples, seed, labels="Optional")
    metric = ACCURACY if source.scores_itself or not source.labelled else metric_of(document)
    measure_name = ACCURACY if source.labelled else "agreement"
    count = min(max_samples or len(source), len(source))
    tasks = source.tasks(count)
    of_tasks = f" of {len(tasks)} tasks" if tasks else ""
    points = sum(len(variant.points) for stage in document.spec.stages for variant in stage.variants)
    shown_metric = metric if source.labelled else f"{AGREEMENT}, which is not an accuracy: the samples have no labels"
    console.print(f"{count} of {len(source)} samples{of_tasks}, {points} operating points, metric {shown_metric}")
    digest = source.digest()
    evaluation = Evaluation(document, pipeline_folder(pipeline), source, count)
    with RunFolder() as folder, counting_progress() as progress:
        bar = progress.add_task("starting", total=None)

        def on_progress(choices: int, description: str) -> None:
            progress.update(bar, total=choices * count, advance=1, description=description)

        answers = asyncio.run(evaluate(evaluation, folder, on_progress))
    measure = partial(tally, metric, document)
    tallies = {choice: measure(listed) for choice, listed in answers.items()}
    by_task_stages = task_accuracy_stages(document) if tasks else ()
    confidences = {choice: mean_confidences(listed, by_task_stages) for choice, listed in answers.items()}
    measured = accuracies(document, tallies, digest, confidences, "Measured" if source.labelled else "Agreement")
    by_task = task_accuracies(document, answers, tasks, digest, measure) if source.labelled else {}
    home = pipeline_folder(pipeline)
    digests = {
        (stage.name, variant.name): model_identity(variant, home).digest
        for stage in document.spec.stages
        for variant in stage.variants
    }
    shares = output_shares(document, answers)
    measured = {
        key: accuracy.replace(model_digest=digests[key[:2]], output_shares=shares.get(key, {}))
        for key, accuracy in measured.items()
    }
    seconds = _row_seconds(pipeline, document)
    escalations_by_point = escalations(document, answers, seconds) if metric == ACCURACY else {}
    rows = [
        _row(document, point, task, accuracy)
        for point, overall in measured.items()
        for task, accuracy in (("", overall), *by_task.get(point, {}).items())
    ]
    console.print(terminal_table(COLUMNS, rows))
    text = with_accuracies(pipeline_file(pipeline).read_text(), measured, by_task)
    write_edited(out or pipeline_file(pipeline), with_escalations(text, escalations_by_point))
    for (_, variant, point), options in escalations_by_point.items():
        if options:
            best = options[-1]
            console.print(
                f"{variant} {point}: {len(options)} escalations, up to {measure_name} {best.accuracy:.4f} "
                f"with {best.share:.0%} of the samples escalated to {' '.join(best.target(variant))}"
            )
    figures: dict[str, float | int | str | None] = {"samples": count, "samples_digest": digest, "metric": metric}
    figures |= {f"{measure_name}_{'_'.join(point)}": accuracy.value for point, accuracy in measured.items()}
    figures |= {
        f"accuracy_{'_'.join(point)}_{task}": accuracy.value
        for point, listed in by_task.items()
        for task, accuracy in listed.items()
    }
    figures |= {f"escalations_{'_'.join(point)}": len(options) for point, options in escalations_by_point.items()}
    ResultLine(name="evaluate", figures=figures).print()
    return 0


def _row_seconds(path: Path, pipeline: InferencePipeline) -> dict[PointKey, float]:
    """Map points to their seconds of a row, from a profile of this machine; empty without one of all points."""
    choice = find_profile(path, pipeline, None)
    profiles = {} if choice is None else load_profiles(choice.path)
    seconds = {
        (stage, point.variant, point.operating_point): 1 / max(m.throughput_rps for m in point.measurements)
        for stage, profile in profiles.items()
        for point in profile.spec.points
    }
    keys = {(s.name, v.name, point.name) for s in pipeline.spec.stages for v in s.variants for point in v.points}
    return seconds if keys <= seconds.keys() else {}


def _row(pipeline: InferencePipeline, key: PointKey, task: str, accuracy: Accuracy) -> tuple[str, ...]:
    stage, variant, name = key
    point = pipeline.spec.stage(stage).variant(variant).point(name)
    previous = point.accuracy_by_task.get(task) if task else point.measured_accuracy()
    before = "" if previous is None else f"{previous.value:.4f} {previous.evidence_label}"
    confidence = "" if accuracy.mean_confidence is None else f"{accuracy.mean_confidence:.4f}"
    interval = f"{accuracy.low:.4f} – {accuracy.high:.4f}"
    return stage, variant, name, task or "all", before, f"{accuracy.value:.4f}", interval, confidence
