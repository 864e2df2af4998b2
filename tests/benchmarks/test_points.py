"""Thresholds on tuned operating points, and images written as files of users."""

import torch

from benchmarks.harness.report import Report
from benchmarks.points import document, judge, write_images
from trimtab_pipelines.spec import InferencePipeline
from trimtab_training.task_training import LabelledImages

EVIDENCE = {"source": "Measured", "samples": 1000, "low": 0.6, "high": 0.8}


def holding(speeds, served, seconds=60.0, tried=20):
    points = [{"name": f"p{n}", "accuracy": 0.7, "accuracyEvidence": EVIDENCE} for n in range(len(speeds))]
    content = document()
    content["spec"]["stages"][0]["variants"][0]["operatingPoints"] = points
    variant = InferencePipeline.model_validate(content).spec.stages[0].variants[0]
    found = {"tried": tried, **{f"p{n}_speed_up": speed for n, speed in enumerate(speeds)}}
    again = {f"accuracy_classify_vit_p{n}": accuracy for n, accuracy in enumerate(served)}
    report = Report("bench-points")
    judge(report, found, seconds, again, variant)
    return [bar.holds for bar in report.bars]


def test_each_bar_holds_of_good_points_and_of_no_others():
    good = [0.7, 0.65, 0.79]

    assert holding([1.0, 1.3, 1.5], good) == [True] * 5
    assert holding([1.0, 1.3, 1.5], good, seconds=601.0, tried=7) == [False, False, True, True, True]
    assert holding([1.0, 1.3], good[:2]) == [True, True, False, True, True]
    assert holding([1.0, 1.3, 1.32], good) == [True, True, True, False, True]
    assert holding([1.0, 1.3, 1.5], [0.7, 0.59, 0.7]) == [True, True, True, True, False]


def test_images_lie_in_folders_named_by_their_labels(tmp_path):
    images = LabelledImages(torch.arange(3 * 64, dtype=torch.uint8).view(3, 1, 8, 8), torch.tensor([2, 0, 2]))

    found = write_images(images, tmp_path).rglob("*.png")

    assert sorted(path.relative_to(tmp_path).as_posix() for path in found) == ["00/1.png", "02/0.png", "02/2.png"]
