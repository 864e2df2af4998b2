"""``make bench NAME=tuning``: operating points of a vision transformer that `trimtab tune` finds, then served.

`trimtab tune` gets the small transformer's finer twin on one of its tasks and 1,000 labelled images in a folder; what
it keeps is served by `trimtab evaluate` on as many images more that it has not seen. Both are run as a user runs them.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from benchmarks.harness.report import Report
from trimtab.options import console
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.variants import Variant
from trimtab_training.prompt_tuning import LabelledImages
from trimtab_training.vit_tasks import train_finer_patches
from trimtab_training.vit_tasks.datasets import SEED, TASKS

FOLDER = Path(__file__).parents[1] / "pipelines" / "vit-tasks"
TASK, CORES = "crops", 2
STAGE, VARIANT = "classify", "vit"
WEIGHTS = "vit.safetensors"
SECOND_SEED = 1_000
"""Of the images that what was selected is served on."""
ResultDocument = Mapping[str, Any]


def document() -> dict[str, Any]:
    """A pipeline of the transformer alone; its first task is the one that it answers."""
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
        place = folder / f"{label:02}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[0].numpy()).save(place / f"{number}.png")
    return folder


def run(*arguments: str | Path) -> tuple[ResultDocument, float]:
    """Run a command of ours; its last line, and the seconds that it took."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", *map(str, arguments)], stdout=subprocess.PIPE, text=True, check=True
    )
    console.print(done.stdout, markup=False, highlight=False)
    result: ResultDocument = json.loads(done.stdout.splitlines()[-1])
    return result, time.monotonic() - began


def judge(report: Report, tuned: ResultDocument, seconds: float, served: ResultDocument, variant: Variant) -> None:
    """Compare the points that were found, and their accuracy on other images, with the goals."""
    figures, names = tuned["figures"], [point.name for point in variant.operating_points]
    speeds = [1.0, *(float(figures[f"{name}_speed_up"]) for name in names[1:])]
    outside = [name for name in names if not _inside(variant, name, served)]
    report.hold("minutes until points were found", seconds / 60, "<=", 10.0)
    report.hold("forms tried", figures["tried"], ">=", 8)
    report.hold("points selected", len(names), ">=", 3)
    report.hold("a point's speed over the next more accurate one's, least", min(_steps(speeds)), ">=", 1.05)
    report.hold("points whose served accuracy is outside of their interval", len(outside), "==", 0)


def _steps(speeds: Sequence[float]) -> list[float]:
    return [faster / why_slower for why_slower, faster in pairwise(speeds)] or [0.0]


def _inside(variant: Variant, name: str, served: ResultDocument) -> bool:
    interval = variant.point(name).measured_accuracy()
    return (interval.low or 0.0) <= _served(name, served) <= (interval.high or 1.0)


def _served(name: str, served: ResultDocument) -> float:
    return float(served["figures"][f"accuracy_{STAGE}_{VARIANT}_{name}"])


def main() -> int:
    """Run it; 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="benchmarks.points", description=__doc__)
    parser.add_argument("--images", type=int, default=1_000, help="that points are chosen on")
    parser.add_argument("--second", type=int, default=1_000, help="that they are served on")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as name:
        folder = Path(name)
        shutil.copyfile(
            FOLDER / train_finer_patches.WEIGHTS, folder / WEIGHTS
        )  # what is compiled is written beside them
        (folder / "pipeline.yaml").write_text(yaml.safe_dump(document()), encoding="utf-8")
        first = write_images(TASKS[TASK]("held-out", given.images, SEED), folder / "first")
        second = write_images(TASKS[TASK]("held-out", given.second, SECOND_SEED), folder / "second")
        found, seconds = run("tune", folder, "--samples", first)
        variant = load_pipeline(folder).spec.stage(STAGE).variant(VARIANT)
        served, _ = run("evaluate", folder, "--samples", second, "--out", folder / "served.yaml")
    report = Report("bench-points", {"images": given.images, "second_images": given.second})
    report.add({name: figure for name, figure in found["figures"].items() if name != "samples"})
    report.add({f"{point.name}_served": _served(point.name, served) for point in variant.operating_points})
    judge(report, found, seconds, served, variant)
    return report.finish()
