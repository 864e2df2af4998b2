"""Tokens per image chosen by load on vLLM: twice the load that full resolution carries, with and without fewer tokens.

Weights are random, so the accuracies of the operating points are declared.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conformance.installed import system_program
from tests.e2e.vllm_engine import container
from tests.figures import Figures
from tests.local_run import trimtab, up
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.engines import a_served
from tests.tiny_qwen_vl import write_vision_model
from trimtab_pipelines.documents import dump_yaml, load_profiles

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

FULL_PIXELS, FEW_PIXELS, IMAGE_PX, IMAGES, ANSWER_TOKENS, CONCURRENCY = 1003520, 200704, 1000, 32, 8, 8
SLO_SECONDS, LOAD_SECONDS = 4, 90
POINTS = [
    {"name": "full", "accuracy": 0.82, "mmProcessorKwargs": {"max_pixels": FULL_PIXELS}},
    {"name": "few", "accuracy": 0.78, "mmProcessorKwargs": {"max_pixels": FEW_PIXELS}},
]
OPTIONS = f"--max-model-len 4096 --max-num-seqs {CONCURRENCY} --trust-request-mm-kwargs"


@dataclass(frozen=True)
class Served:
    """Results of a load."""

    within_slo: float
    accuracy: float
    """Mean of the points that served."""
    summary: Mapping[str, Any]


def a_pipeline(folder: Path, model: Path, points: list[dict[str, Any]]) -> Path:
    served = a_served("qwen", image="", **container(system_program("vllm"), model, OPTIONS))
    variant = served | {"operatingPoints": points, "resources": {"cpu": "1"}, "maxBatchSize": CONCURRENCY}
    stage = a_writer(variants=[variant], batchSizes=[1, 2, 4, CONCURRENCY], maxReplicas=1)
    slo = {"latency": "30s", "timeToFirstToken": f"{SLO_SECONDS}s"}
    pipeline = a_chat_pipeline([stage], slo=slo, budget={"cores": "1"}, objective={"goal": "MaxAccuracy"})
    folder.mkdir()
    (folder / "pipeline.yaml").write_text(dump_yaml(pipeline))
    return folder


def write_chats(folder: Path) -> Path:
    """Write samples: a question about one picture each."""
    random, lines = np.random.default_rng(0), []
    folder.mkdir()
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What does it show?"}]}]
    for number in range(IMAGES):
        coarse = Image.fromarray(random.integers(0, 255, (20, 20, 3), dtype=np.uint8))
        coarse.resize((IMAGE_PX, IMAGE_PX)).save(folder / f"{number}.png")
        options = json.dumps({"max_tokens": ANSWER_TOKENS, "ignore_eos": True})
        inputs = {"messages": json.dumps(asked), "images": [{"file": f"{number}.png"}], "options": options}
        lines.append(json.dumps({"inputs": inputs, "outputs": {"text": ""}}))
    (folder / "samples.jsonl").write_text("\n".join(lines))
    return folder


def serve(pipeline: Path, chats: Path, load_rps: float) -> Served:
    """Serve a load; the plan adapts."""
    out = pipeline / "load"
    with up(pipeline, pipeline=pipeline / "pipeline.yaml") as local:
        load = ["--load", f"constant:{load_rps}", "--duration", str(LOAD_SECONDS), "--samples", str(chats)]
        address = ["--protocol", "chat", "--address", local.url.removeprefix("http://"), "-o", str(out)]
        trimtab("loadtest", str(pipeline), *load, *address)
    *_, last = (pipeline / "run" / "samples.jsonl").read_text().splitlines()
    counters, summary = json.loads(last)["counters"], json.loads((out / "load.json").read_bytes())["summary"]
    return Served(summary["slo_fraction"], counters["accuracy_sum"] / counters["accuracy_count"], summary)


def test_fewer_tokens_of_images_carry_twice_the_load(figures: Figures, tmp_path: Path) -> None:
    model, chats = tmp_path / "model", write_chats(tmp_path / "chats")
    write_vision_model(model, FULL_PIXELS)
    both, full = (a_pipeline(tmp_path / name, model, POINTS[:count]) for name, count in (("both", 2), ("full", 1)))
    done = trimtab("profile", str(both), "--quick", "--samples", str(chats), timeout_seconds=600)
    assert done.code == 0, done.errors
    profile = (both / "profile.yaml").read_text()
    (full / "profile.yaml").write_text(profile)
    points = {point.operating_point: point for point in load_profiles(both / "profile.yaml")["text"].spec.points}
    load_rps = 2.0 * points["full"].throughput_rps(CONCURRENCY)

    served = {name: serve(folder, chats, load_rps) for name, folder in (("both", both), ("full", full))}

    for name, point in points.items():
        assert point.chats is not None
        figures.add(**{f"{name}_rps": point.throughput_rps(CONCURRENCY), f"{name}_tokens": point.chats.prompt_tokens})
    figures.add(load_rps=load_rps, received=served["both"].summary["received"])
    for name, result in served.items():
        figures.add(**{f"{name}_within_slo": result.within_slo, f"{name}_accuracy": result.accuracy})
        figures.require(f"{name}: failed", result.summary["failed"], "==", 0)
    figures.require("within the SLO by load", served["both"].within_slo, ">=", 0.99, depends_on_load=True)
    figures.require("within the SLO at full resolution", served["full"].within_slo, "<=", 0.6, depends_on_load=True)
