"""Tuning benchmark: operating points of a vision transformer that `trimtab tune` finds, served on other images.

`trimtab tune` gets the transformer with finer patches, one of its tasks and 1,000 labelled images in a folder.
`trimtab evaluate` serves the points that it keeps on as many unseen images. Both run as a user runs them.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from benchmarks.harness.report import Report
from trimtab.options import console
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.variants import Variant
from trimtab_training.task_training import LabelledImages
from trimtab_training.vit_tasks import train_finer_patches
from trimtab_training.vit_tasks.datasets import SEED, TASKS

FOLDER = Path(__file__).parents[1] / "pipelines" / "vit-tasks"
TASK, CORES = "crops", 2
STAGE, VARIANT = "classify", "vit"
WEIGHTS = "vit.safetensors"
SECOND_SEED = 1_000
"""Of the images that the selected points are served on."""
Figures = Mapping[str, Any]


def document() -> dict[str, Any]:
    """Return a pipeline of the transformer alone, which answers its first task."""
    stage = {
        "name": STAGE,
        "inputs": [{"name": "image", "from": "request.inputs.image"}],
        "outputs": [{"name": "label", "datatype": "INT64"}, {"name": "confidence", "datatype": "FP32"}],
        "confidence": "confidence",
        "variants": [
            {
                "name": VARIANT,
                "family": "vision-transformer",
                "storageUri": WEIGHTS,
                "accuracy": 0.5,
                "resources": {"cpu": str(CORES)},
            }
        ],
    }
    return {
        "apiVersion": "trimtab.dev/v1alpha1",
        "kind": "InferencePipeline",
        "metadata": {"name": "own"},
        "spec": {
            "inputs": [{"name": "image", "datatype": "UINT8", "shape": [1, 32, 32]}],
            "outputs": [{"name": "label", "from": f"{STAGE}.outputs.label"}],
            "slo": {"latency": "1s"},
            "budget": {"cores": str(CORES)},
            "stages": [stage],
        },
    }


def write_images(images: LabelledImages, folder: Path) -> Path:
    """Write images by label, as users have them."""
    for number, (pixels, label) in enumerate(zip(images.pixels, images.labels.tolist(), strict=True)):
        label_folder = folder / f"{label:02}"
        label_folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[0].numpy()).save(label_folder / f"{number}.png")
    return folder


def run(*arguments: str | Path) -> tuple[Figures, float]:
    """Run a command of ours; return the figures of its last line, and the seconds that it took."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True
    )
    console.print(done.stdout, markup=False, highlight=False)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    return figures, time.monotonic() - began


def judge(report: Report, tuned: Figures, seconds: float, served: Figures, variant: Variant) -> None:
    """Compare the points that were found, and their accuracy on other images, with the goals."""
    names = [point.name for point in variant.operating_points]
    speeds = [1.0, *(float(tuned[f"{name}_speed_up"]) for name in names[1:])]
    steps = [faster / slower for slower, faster in pairwise(speeds)] or [0.0]
    intervals = {name: variant.point(name).measured_accuracy() for name in names}
    outside = sum(
        not (interval.low or 0.0) <= served_accuracy(served, name) <= (interval.high or 1.0)
        for name, interval in intervals.items()
    )
    report.hold("minutes until points were found", seconds / 60, "<=", 10.0)
    report.hold("forms tried", tuned["tried"], ">=", 8)
    report.hold("points selected", len(names), ">=", 3)
    report.hold("a point's speed over the next more accurate one's, least", min(steps), ">=", 1.05)
    report.hold("points whose served accuracy is outside of their interval", outside, "==", 0)


def served_accuracy(served: Figures, name: str) -> float:
    return float(served[f"accuracy_{STAGE}_{VARIANT}_{name}"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks tuning", description=__doc__)
    parser.add_argument("--images", type=int, default=1_000, help="that points are chosen on")
    parser.add_argument("--second", type=int, default=1_000, help="that they are served on")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as name:
        folder = Path(name)
        shutil.copyfile(FOLDER / train_finer_patches.WEIGHTS, folder / WEIGHTS)  # compiled forms are written beside it
        (folder / "pipeline.yaml").write_text(yaml.safe_dump(document()), encoding="utf-8")
        first = write_images(TASKS[TASK]("held-out", options.images, SEED), folder / "first")
        second = write_images(TASKS[TASK]("held-out", options.second, SECOND_SEED), folder / "second")
        tuned, seconds = run("tune", folder, "--samples", first)
        variant = load_pipeline(folder).spec.stage(STAGE).variant(VARIANT)
        served, _ = run("evaluate", folder, "--samples", second, "--out", folder / "served.yaml")
    report = Report("bench-points", {"images": options.images, "second_images": options.second})
    report.add({name: figure for name, figure in tuned.items() if name != "samples"})
    report.add({f"{point.name}_served": served_accuracy(served, point.name) for point in variant.operating_points})
    judge(report, tuned, seconds, served, variant)
    return report.finish()
