"""The two ways to serve lmm-digits, each by `trimtab up`: whole in each replica, or parted in two pools."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from tests.local_run import Up, up

FOLDER: Final = Path("pipelines/lmm-digits")
ARCHITECTURES: Final = ("decoder-only", "cross-attention")
SLOTS: Final = 16
PLANNED: Final = "planned"
"""Beside how many replicas each stage has: whoever plans chooses between reading images whole and apart."""


@dataclass(frozen=True, slots=True)
class Promise:
    """When an answer begins, and how fast it goes on."""

    first_token_seconds: float
    per_token_seconds: float

    def times(self, factor: float) -> "Promise":
        """So many times as long."""
        return Promise(factor * self.first_token_seconds, factor * self.per_token_seconds)


FORGIVING: Final = Promise(3.0, 0.5)
"""Promised where things die or lateness is what is measured: nobody is dropped for it."""


def _file(layout: Mapping[str, int] | None) -> str:
    if layout is None:
        return PLANNED
    return "pipeline" if len(layout) == 1 else "parted"


@contextmanager
def serving(
    folder: Path,
    layout: Mapping[str, int] | None,
    architecture: str,
    promise: Promise,
    plan: Mapping[str, Any] | None = None,
    *,
    cache_bytes: int = 0,
    encoder_cores: str = "500m",
) -> Iterator[Up]:
    """Serve it.

    Args:
        folder: of the run.
        layout: replicas by stage, of a core each, which stay as they are; one stage alone is the model whole. None: the
            plan chooses the layout and how many replicas.
        architecture: of the model.
        promise: what is promised.
        plan: what runs, instead of whoever plans.
        cache_bytes: of embeddings in each replica; 0 where each image is one that nobody has shown before.
        encoder_cores: what an encoder is told to have, where the plan chooses.
    """
    source = yaml.safe_load((FOLDER / f"{_file(layout)}.yaml").read_text())
    spec = source["spec"]
    spec["slo"] = {"latency": "5s", "timeToFirstToken": f"{promise.first_token_seconds}s"}
    spec["slo"]["timePerOutputToken"] = f"{promise.per_token_seconds}s"
    spec["budget"] = {"cores": "4"} if layout is not None else {"cores": "2", "surgeCores": "1"}
    for stage in spec["stages"]:
        if layout is None:
            stage["variants"] = [_of(one, architecture, cache_bytes) for one in stage["variants"]]
            stage["batchSizes"] = [1, 2, 4, 8, 16] if stage.get("writes") else [1, 2, 4, 8]
            if stage.get("encodes"):
                stage["variants"][0]["resources"]["cpu"] = encoder_cores
            continue
        found = next((one for one in stage["variants"] if one["name"] == architecture), stage["variants"][0])
        stage["variants"] = [_of(found, architecture, cache_bytes)]
        stage["variants"][0]["resources"]["cpu"] = "1"
        size = SLOTS if stage.get("writes") else 8
        stage["batchSizes"] = [size]
        stage["pin"] = {"replicas": layout[stage["name"]], "batchSize": size}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(source))
    arguments = []
    if plan is not None:
        (folder / "plan.json").write_text(json.dumps(plan))
        arguments = ["--plan", str(folder / "plan.json")]
    with up(folder, *arguments, run_folder=folder / "run", pipeline=path) as served:
        yield served


def _of(variant: dict[str, Any], architecture: str, cache_bytes: int) -> dict[str, Any]:
    """A variant with the weights of an architecture, and its name where it has no other than its weights'."""
    weights = (FOLDER / "weights" / f"{architecture}.safetensors").resolve()
    own = variant | {"storageUri": str(weights)}
    if own["name"] in ARCHITECTURES:
        own["name"] = architecture
    if not own["family"].endswith("encode"):
        own["maxBatchSize"] = SLOTS
    return own | {"parameters": {"slots": SLOTS, "cache_bytes": cache_bytes}}


def servers(served: Up, stage: str) -> list[psutil.Process]:
    """The model servers of a stage."""
    logs = {str(path) for path in (served.folder / "logs").glob(f"{stage}-*.log")}
    below = psutil.Process(served.process.pid).children(recursive=True)
    return [process for process in below if _writes_to(process, logs)]


def _writes_to(process: psutil.Process, logs: set[str]) -> bool:
    try:
        return any(file.path in logs for file in process.open_files())
    except psutil.Error:
        return False
