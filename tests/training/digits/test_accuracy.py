"""Committed weights reach the committed accuracies."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from tests.training.digits import variants_of
from trimtab_model_servers.families.digits.family import VARIANTS, load
from trimtab_model_servers.families.digits.locator import Locator
from trimtab_model_servers.families.digits.reader import Reader
from trimtab_pipelines.accuracy_evidence import wilson_interval
from trimtab_pipelines.documents import load_pipeline
from trimtab_training.digits.escalations import StageEvidence, print_options, write_evidence
from trimtab_training.digits.evaluate import locate_all, measure, read_all
from trimtab_training.digits.page_generator import PageSource

FOLDER = Path(__file__).parents[3] / "pipelines" / "digits"
WEIGHTS = FOLDER / "weights"
PAGES = 150


@pytest.fixture(scope="module")
def report():
    return json.loads((FOLDER / "accuracy.json").read_text())


@pytest.fixture(scope="module")
def measured():
    """Every variant on pages other than those of the report, from the held-out sources too."""
    networks = {name: load(WEIGHTS / f"{name}.safetensors") for name in VARIANTS}
    locators = {name: network for name, network in networks.items() if isinstance(network, Locator)}
    readers = {name: network for name, network in networks.items() if isinstance(network, Reader)}
    return measure(locators, readers, PageSource("held-out", seed=77).pages(0, PAGES))


def test_report_covers_every_variant_and_pair(report):
    assert list(report["variants"]) == list(VARIANTS)
    assert len(report["pairs"]) == len(variants_of("locate")) * len(variants_of("read"))
    for name, entry in report["variants"].items():
        assert entry["n"] >= 4000, name
        assert entry["low"] < entry["accuracy"] < entry["high"], name
        low, _ = wilson_interval(round(entry["accuracy"] * entry["n"]), entry["n"])
        assert entry["low"] == pytest.approx(low, abs=2e-4), name
        assert entry["weights_bytes"] == (WEIGHTS / f"{name}.safetensors").stat().st_size


def test_each_heavier_variant_is_more_accurate(report):
    """Intervals do not overlap."""
    for family in ("locate", "read"):
        names = variants_of(family)
        for lighter, heavier in pairwise(names):
            assert report["variants"][lighter]["high"] < report["variants"][heavier]["low"], (lighter, heavier)


def test_heaviest_pair_is_far_more_accurate_than_lightest(report):
    by_pair = {(pair["locate"], pair["read"]): pair["accuracy"] for pair in report["pairs"]}
    lightest = by_pair[variants_of("locate")[0], variants_of("read")[0]]
    heaviest = by_pair[variants_of("locate")[-1], variants_of("read")[-1]]

    assert heaviest - lightest >= 0.15


def test_product_of_stages_predicts_every_pair(report):
    """Within one percentage point, as the solver assumes."""
    for pair in report["pairs"]:
        product = report["variants"][pair["locate"]]["accuracy"] * report["variants"][pair["read"]]["accuracy"]
        assert pair["product"] == pytest.approx(product, abs=2e-4)
        assert abs(product - pair["accuracy"]) <= 0.01, pair
    assert report["largest_product_error"] <= 0.01


def test_weights_are_small_enough_to_commit():
    assert sum(path.stat().st_size for path in WEIGHTS.glob("*.safetensors")) <= 3_000_000
    assert {path.stem for path in WEIGHTS.glob("*.safetensors")} == set(VARIANTS)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_weights_reach_their_reported_accuracy(variant, report, measured):
    """Four standard errors of the small sample beside the report's own interval."""
    entry, measurement = report["variants"][variant], measured.stages[variant]
    margin = 4 * math.sqrt(entry["accuracy"] * (1 - entry["accuracy"]) / measurement.samples)

    assert entry["low"] - margin <= measurement.value <= entry["high"] + margin


def test_evidence_is_written_into_the_pipeline(measured, tmp_path, capsys):
    path = tmp_path / "pipeline.yaml"
    path.write_text((FOLDER / "pipeline.yaml").read_text())
    evidence = {stage: StageEvidence.of(measured, stage) for stage in ("locate", "read")}
    write_evidence(path, measured, evidence)
    print_options(measured, evidence)

    for stage in load_pipeline(path).spec.stages:
        for variant in stage.variants:
            assert variant.accuracy == measured.stages[variant.name].value
            assert variant.accuracy_evidence.mean_confidence == pytest.approx(
                evidence[stage.name].rows[variant.name].sample().right.mean(), abs=0.12
            )
            assert evidence[stage.name].calibration_entry(variant.name)["slope"] > 0
        assert sum(len(variant.escalations) for variant in stage.variants) > 0
    assert "classes skewed" in capsys.readouterr().out


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

    assert together.total == sum(output.total for output in page_by_page)
    assert len(together.labels) == sum(len(output.labels) for output in page_by_page) == len(together.crops)
    assert 0 < read_all(reader, together).correct.sum() <= len(together.labels) <= together.total
