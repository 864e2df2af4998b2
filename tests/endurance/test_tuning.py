"""Operating points of a vision transformer that `trimtab tune` finds, served on other images.

`trimtab tune` gets the transformer with finer patches, one of its tasks and 1,000 labelled images in a folder.
`trimtab evaluate` serves the points that it keeps on as many unseen images. Both run as a user runs them.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from tests.figures import Figures
from trimtab_pipelines.documents import load_pipeline
from trimtab_training.task_training import LabelledImages
from trimtab_training.vit_tasks import train_finer_patches
from trimtab_training.vit_tasks.datasets import SEED, TASKS

pytestmark = [pytest.mark.endurance, pytest.mark.timeout(1200)]

FOLDER = Path(__file__).parents[2] / "pipelines" / "vit-tasks"
TASK, CORES, IMAGES = "crops", 2, 1_000
STAGE, VARIANT = "classify", "vit"
WEIGHTS = "vit.safetensors"
SECOND_SEED = 1_000
"""Of the images that the selected points are served on."""


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


def run(*arguments: str | Path) -> Mapping[str, Any]:
    """Run a command of Trimtab; return the figures of its last line."""
    command = [sys.executable, "-m", "trimtab", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])["figures"]
    return result


def test_tuned_points_are_as_accurate_on_other_images(tmp_path: Path, figures: Figures) -> None:
    shutil.copyfile(FOLDER / train_finer_patches.WEIGHTS, tmp_path / WEIGHTS)  # compiled forms are written beside it
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(document()), encoding="utf-8")
    first = write_images(TASKS[TASK]("held-out", IMAGES, SEED), tmp_path / "first")
    second = write_images(TASKS[TASK]("held-out", IMAGES, SECOND_SEED), tmp_path / "second")

    began = time.monotonic()
    tuned = run("tune", tmp_path, "--samples", first)
    minutes = (time.monotonic() - began) / 60
    points = load_pipeline(tmp_path).spec.stage(STAGE).variant(VARIANT).operating_points
    served = run("evaluate", tmp_path, "--samples", second, "--out", tmp_path / "served.yaml")

    speeds = [1.0, *(float(tuned[f"{point.name}_speed_up"]) for point in points[1:])]
    outside = 0
    for point in points:
        accuracy = float(served[f"accuracy_{STAGE}_{VARIANT}_{point.name}"])
        interval = point.measured_accuracy()
        outside += not (interval.low or 0.0) <= accuracy <= (interval.high or 1.0)
        figures.add(**{f"{point.name}_accuracy": point.accuracy, f"{point.name}_served": accuracy})
    figures.require("minutes until points were found", minutes, "<=", 10.0, depends_on_load=True)
    figures.require("candidates tried", tuned["tried"], ">=", 8)
    figures.require("points selected", len(points), ">=", 3)
    steps = [faster / slower for slower, faster in pairwise(speeds)]
    figures.require("a point's speed over the next more accurate one's, least", min(steps, default=0.0), ">=", 1.05)
    figures.require("points whose served accuracy is outside of their interval", outside, "==", 0)
