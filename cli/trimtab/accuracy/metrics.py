"""Metrics of answers by task, as a value from 0 to 1 with a bootstrap interval; their libraries are imported on use.

Metrics in RATIOS are sums over samples (a mean, or the error rate of words); those in CORPUS are of all samples.
"""

import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from string import punctuation
from typing import Any

import numpy as np

from trimtab.accuracy.attribution import ReceivedAnswer, Tally
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.graph import split_reference
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol.tensors import Array

METRIC_ANNOTATION = "trimtab.dev/metric"
ACCURACY = "accuracy"
RATIO_RESAMPLES, CORPUS_RESAMPLES = 2000, 100
INTERVAL_PERCENT = (2.5, 97.5)
BY_FAMILY = {
    "hf/question-answering": "f1",
    "hf/summarization": "rouge-l",
    "hf/translation": "bleu",
    "hf/speech-recognition": "word-accuracy",
    "hf/object-detection": "map",
}
"""Metrics that follow from the family that gives a pipeline's outputs; of others it is the share of correct answers."""
Ratio = Callable[[str, str], tuple[float, float]]
Corpus = Callable[[Sequence[Any], Sequence[Any]], float]


def _normalized(text: str) -> list[str]:
    """The words that SQuAD's evaluation compares: no case, punctuation or articles."""
    plain = "".join(character for character in text.lower() if character not in punctuation)
    return [word for word in plain.split() if word not in {"a", "an", "the"}]


def _f1(truth: str, answer: str) -> tuple[float, float]:
    expected, given = _normalized(truth), _normalized(answer)
    common = (Counter(expected) & Counter(given)).total()
    return (2 * common / (len(expected) + len(given)) if expected and given else float(expected == given)), 1.0


def _exact_match(truth: str, answer: str) -> tuple[float, float]:
    return float(_normalized(truth) == _normalized(answer)), 1.0


def _rouge(truth: str, answer: str) -> tuple[float, float]:
    scorer = _library("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=True)
    return float(scorer.score(truth, answer)["rougeL"].fmeasure), 1.0


def _words(truth: str, answer: str) -> tuple[float, float]:
    """Words without errors, and words; 1 - WER, whatever the case and punctuation."""
    jiwer = _library("jiwer")
    plain = jiwer.Compose([jiwer.ToLowerCase(), jiwer.RemovePunctuation(), jiwer.RemoveMultipleSpaces(), jiwer.Strip()])
    truth, answer = plain(truth), plain(answer)
    words, heard = len(truth.split()), len(answer.split())
    if not words:
        return -heard, 0
    counts = jiwer.process_words(truth, answer)
    return words - counts.substitutions - counts.deletions - counts.insertions, words


def _sacrebleu(metric: str) -> Corpus:
    return lambda truths, answers: (
        float(getattr(_library("sacrebleu"), f"corpus_{metric}")([*answers], [[*truths]]).score) / 100
    )


def _mean_average_precision(truths: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> float:
    """COCO's mAP at an IoU from 0.5 to 0.95, of boxes xmin, ymin, xmax, ymax."""
    names = {str(label): number for number, label in enumerate({str(label) for t in truths for label in t["label"]}, 1)}
    coco, evaluation = _library("pycocotools.coco"), _library("pycocotools.cocoeval")

    def boxes(images: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [
            {"image_id": image, "category_id": names[str(label)], "bbox": [x, y, right - x, bottom - y], "iscrowd": 0}
            | {"area": (right - x) * (bottom - y), "score": float(score)}
            for image, found in enumerate(images)
            for label, (x, y, right, bottom), score in zip(
                found["label"], found["box"], found.get("score", [1] * len(found["label"])), strict=True
            )
            if str(label) in names
        ]

    given = boxes(answers)
    if not given:
        return 0.0
    with redirect_stdout(io.StringIO()):  # it prints its progress
        expected = coco.COCO()
        expected.dataset = {
            "images": [{"id": image} for image in range(len(truths))],
            "annotations": [box | {"id": number} for number, box in enumerate(boxes(truths), 1)],
            "categories": [{"id": number} for number in names.values()],
        }
        expected.createIndex()
        result = evaluation.COCOeval(expected, expected.loadRes(given), "bbox")
        result.evaluate()
        result.accumulate()
        result.summarize()
    return max(0.0, float(result.stats[0]))


RATIOS: Mapping[str, Ratio] = {"f1": _f1, "exact-match": _exact_match, "rouge-l": _rouge, "word-accuracy": _words}
CORPUS: Mapping[str, Corpus] = {"bleu": _sacrebleu("bleu"), "chrf": _sacrebleu("chrf"), "map": _mean_average_precision}
METRICS = (ACCURACY, *RATIOS, *CORPUS)


def metric_of(pipeline: InferencePipeline) -> str:
    """The metric that a pipeline's annotation names, or that its families imply; raises UserError if it is unknown."""
    named = pipeline.metadata.annotations.get(METRIC_ANNOTATION)
    if named is not None and named not in METRICS:
        raise UserError(f"metadata.annotations[{METRIC_ANNOTATION}] {named!r} is unknown; known: {', '.join(METRICS)}")
    stages = {split_reference(output.source)[0] for output in pipeline.spec.outputs}
    families = [variant.family for stage in pipeline.spec.stages if stage.name in stages for variant in stage.variants]
    return named or next((BY_FAMILY[family] for family in families if family in BY_FAMILY), ACCURACY)


def tally(metric: str, pipeline: InferencePipeline, answers: Sequence[ReceivedAnswer]) -> Tally:
    """The results of all answers with one choice; raises UserError if a sample has no truth that the metric reads."""
    if metric == ACCURACY or not answers:
        return Tally.of([answer.score for answer in answers])
    read = _objects if metric == "map" else _text
    truths, given = zip(*(read(pipeline, answer) for answer in answers), strict=True)
    count, random = len(answers), np.random.default_rng(0)
    if metric in RATIOS:
        ratios = np.array([RATIOS[metric](truth, text) for truth, text in zip(truths, given, strict=True)])
        everything = np.arange(count)[None]
        samples = random.integers(count, size=(RATIO_RESAMPLES, count))
        value, resampled = (_ratio(ratios[chosen].sum(axis=1)) for chosen in (everything, samples))
    else:
        score = CORPUS[metric]
        samples = random.integers(count, size=(CORPUS_RESAMPLES, count))
        value = np.array([score(truths, given)])
        resampled = np.array([score([truths[i] for i in chosen], [given[i] for i in chosen]) for chosen in samples])
    low, high = np.percentile(resampled, INTERVAL_PERCENT)
    return Tally(count * float(value[0]), count, count, count, (float(low), float(high)))


def _ratio(sums: Array) -> Array:
    return np.clip(sums[:, 0] / np.maximum(sums[:, 1], 1), 0.0, 1.0)


def _text(pipeline: InferencePipeline, answer: ReceivedAnswer) -> tuple[str, str]:
    """The first labelled text and the answer to it."""
    for output in pipeline.spec.outputs:
        truth, array = (side.get(output.name) for side in (answer.truth, answer.outputs))
        if isinstance(truth, str) and array is not None:
            return truth, b" ".join(array.ravel()).decode(errors="replace")
    raise UserError("a sample has no text among its outputs, which the metric compares")


def _objects(pipeline: InferencePipeline, answer: ReceivedAnswer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Labels, boxes and scores, by the names that the detector has for them."""
    names = {split_reference(output.source)[1]: output.name for output in pipeline.spec.outputs}
    if missing := {"label", "box", "score"} - names.keys() or {"label", "box"} - {
        tensor for tensor, name in names.items() if name in answer.truth
    }:
        raise UserError(
            f"metric map needs outputs label, box and score, and samples with label and box; not: {missing}"
        )
    truth = {tensor: answer.truth[names[tensor]] for tensor in ("label", "box")}
    given = {tensor: answer.outputs[names[tensor]] for tensor in ("box", "score")}
    return truth, given | {"label": [label.decode() for label in answer.outputs[names["label"]].ravel()]}


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"this metric needs {error.name}: pip install '.[metrics]' in a clone, else 'trimtab[metrics]'"
        ) from error
