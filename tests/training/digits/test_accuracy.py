"""Committed weights reach the committed accuracies."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.digits import variants_of
from trimtab.accuracy.attribution import ReceivedAnswer, choices, escalations
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_model_servers.families.digits import Calibration
from trimtab_model_servers.families.digits.family import VARIANTS, load
from trimtab_model_servers.families.digits.locator import Locator
from trimtab_model_servers.families.digits.reader import Reader
from trimtab_pipelines.documents import load_pipeline
from trimtab_training.digits.calibration import (
    fit_calibration,
    locate_all,
    read_all,
    score_rows,
    write_calibrations,
)
from trimtab_training.digits.page_generator import EvaluationPages, PageSource

FOLDER = Path(__file__).parents[3] / "pipelines" / "digits"
WEIGHTS = FOLDER / "weights"
PAGES = 150
STATED: dict[str, Any] = {
    variant.name: variant for stage in load_pipeline(FOLDER).spec.stages for variant in stage.variants
}


@pytest.fixture(scope="module")
def networks():
    return {name: load(WEIGHTS / f"{name}.safetensors") for name in VARIANTS}


@pytest.fixture(scope="module")
def pages():
    """Pages other than those that accuracies are measured on, from the held-out sources too."""
    return PageSource("held-out", seed=77).pages(0, PAGES)


@pytest.fixture(scope="module")
def scored(networks, pages):
    return score_rows(networks, pages)


def test_every_variant_has_a_measured_accuracy():
    assert list(VARIANTS) == list(STATED)
    for name, variant in STATED.items():
        evidence = variant.accuracy_evidence
        assert evidence.samples >= 4000, name
        assert evidence.low < variant.accuracy < evidence.high, name


def test_each_heavier_variant_is_more_accurate():
    """On the same pages; the intervals of one variant and the next but one do not overlap."""
    for family in ("locate", "read"):
        names = list(variants_of(family))
        for lighter, heavier in pairwise(names):
            assert STATED[lighter].accuracy < STATED[heavier].accuracy, (lighter, heavier)
        for lighter, heavier in zip(names, names[2:], strict=False):
            assert STATED[lighter].accuracy_evidence.high < STATED[heavier].accuracy_evidence.low, (lighter, heavier)


@pytest.mark.parametrize("locator", variants_of("locate"))
def test_product_of_stages_predicts_every_pair(locator, networks, pages):
    """As the solver assumes; within four standard errors of a small sample, and a point."""
    located = locate_all(networks[locator], pages)
    expected = int(located.pages.total.sum())
    for name in variants_of("read"):
        share = read_all(networks[name], located).correct.sum() / expected
        product = STATED[locator].accuracy * STATED[name].accuracy

        assert abs(share - product) <= 0.01 + 4 * math.sqrt(product * (1 - product) / expected), name


def test_weights_are_small_enough_to_commit():
    assert sum(path.stat().st_size for path in WEIGHTS.glob("*.safetensors")) <= 3_000_000
    assert {path.stem for path in WEIGHTS.glob("*.safetensors")} == set(VARIANTS)


def test_stated_confidences_are_those_of_all_served_rows(networks, pages):
    """Within four standard errors of a small sample, whose rows are correlated by page, and a point."""
    pixels = torch.from_numpy(np.stack([page.pixels for page in pages]))
    for locator in variants_of("locate"):
        with torch.inference_mode():
            _, _, crops, of_pages = networks[locator](pixels)
            of_crops = networks["read-xl"](crops)[1]
        confidence, read = (
            Calibration(*STATED[name].parameters.values()).apply(found)
            for name, found in ((locator, of_pages), ("read-xl", of_crops))
        )
        evidence = STATED[locator].accuracy_evidence
        stated = STATED["read-xl"].accuracy_evidence.mean_confidence + evidence.confidence_shifts.get("read", 0.0)

        assert abs(float(confidence.mean()) - evidence.mean_confidence) <= 0.01 + 4 * 0.2 / math.sqrt(PAGES), locator
        assert abs(float(read.mean()) - stated) <= 0.01 + 4 * 0.2 / math.sqrt(PAGES), locator


def test_calibrations_are_written_into_the_pipeline(scored, tmp_path):
    path = tmp_path / "pipeline.yaml"
    path.write_text((FOLDER / "pipeline.yaml").read_text())
    fitted = {name: fit_calibration(rows) for name, rows in scored.items()}
    write_calibrations(path, {name: calibration for name, (calibration, _) in fitted.items()})

    assert {
        variant.name: [*variant.parameters.values()]
        for stage in load_pipeline(path).spec.stages
        for variant in stage.variants
    } == {name: [calibration.offset, calibration.slope] for name, (calibration, _) in fitted.items()}
    assert all(calibration.slope > 0 and error < 0.3 for calibration, error in fitted.values())


def test_evaluation_pages_give_escalations_of_both_stages(networks):
    """A row of a locator is a page, which is right only if no digit is missing; a row of a reader is a crop."""
    pipeline = load_pipeline(FOLDER)
    samples = LabelledPayloads(pipeline, f"{EvaluationPages.__module__}:{EvaluationPages.__name__}")
    payloads = [samples.payload(number) for number in range(PAGES)]
    answers: dict[Any, Any] = {}
    for (locate, _), (read, _) in choices(pipeline):
        answers[((locate, "default"), (read, "default"))] = [
            _answer(networks[locate], networks[read], samples, payload) for payload in payloads
        ]
    found = escalations(pipeline, answers)

    assert {stage for (stage, _, _), listed in found.items() if listed} == {"locate", "read"}


def _answer(locator, reader, samples, payload):
    with torch.inference_mode():
        count, boxes, crops, located = locator(torch.from_numpy(payload.inputs[0].array))
        digit, confidence = reader(crops)
    outputs = {"count": count.numpy(), "boxes": boxes.numpy(), "digit": digit.numpy()}
    confidences = {
        stage: ",".join(map(str, row.tolist()))
        for stage, row in (("locate", located), ("read", confidence))
        if len(row)
    }
    return ReceivedAnswer(samples.score(payload.truth, outputs), confidences)


def test_shipped_escalations_beat_their_first_pass():
    for stage in load_pipeline(FOLDER).spec.stages:
        accuracies = {variant.name: variant.accuracy for variant in stage.variants}
        for variant in stage.variants:
            for again in variant.escalations:
                second = accuracies[again.target(variant.name)[0]]
                assert second > variant.accuracy
                assert again.accuracy > max(variant.accuracy, again.accuracy_low or 1.0)
                assert again.accuracy <= second + 0.005
        assert any(variant.escalations for variant in stage.variants)


def test_locating_page_by_page_gives_the_same_counts():
    locator, reader = load(WEIGHTS / "locate-m.safetensors"), load(WEIGHTS / "read-m.safetensors")
    assert isinstance(locator, Locator)
    assert isinstance(reader, Reader)
    pages = PageSource("held-out", seed=78).pages(0, 40)

    together = locate_all(locator, pages)
    page_by_page = [locate_all(locator, [page]) for page in pages]

    assert together.pages.total.tolist() == [int(output.pages.total.sum()) for output in page_by_page]
    assert len(together.labels) == sum(len(output.labels) for output in page_by_page) == len(together.crops)
    assert 0 < read_all(reader, together).correct.sum() <= len(together.labels) <= together.pages.total.sum()
