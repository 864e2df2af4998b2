"""Two replicas under 60 requests a second, one of which fails at once, or takes four times as long, for a while."""

import re
import subprocess
import time
import urllib.request
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from tests.builders import a_pipeline_document, a_stage, a_variant
from tests.figures import Figures
from tests.local_run import Up, up
from trimtab_loadtester.results import Results
from trimtab_pipelines.processes.parent_death import command_tied_to_parent
from trimtab_pipelines.request_outcome import DROPPED, OK

pytestmark = [pytest.mark.endurance, pytest.mark.timeout(600)]

MODULE = '''
import os
import time
from pathlib import Path

import torch


class Model(torch.nn.Module):
    """Adds one, unless a file with its process id names a fault."""

    inputs = {"x": ("FP32", (4,))}
    outputs = {"y": ("FP32", (4,))}

    def forward(self, x):
        folder = Path(os.environ["FAULTS"])
        (folder / f"{os.getpid()}.served").touch()
        fault = folder / f"{os.getpid()}.fault"
        kind = fault.read_text() if fault.exists() else ""
        if kind == "error":
            raise RuntimeError("the device is gone")
        time.sleep(0.2 if kind == "slow" else 0.05)
        return x + 1
'''
RATE_RPS, SECONDS, SLO = 60, 45, "180ms"
FAULT_AT_SECONDS, WELL_AT_SECONDS = 10.0, 25.0
MAX_FAILED, FAILING_SECONDS = 3, 1.0
MAX_LATE_SHARE, LEARNING_SECONDS = 0.01, 5.0
MAX_RETURN_SECONDS = 10.0


def write_pipeline(folder: Path) -> Path:
    (folder / "faulty_model.py").write_text(MODULE)
    variant = a_variant("only", family="faulty_model:Model", resources={"cpu": "500m", "memory": "256Mi"})
    stage = a_stage("only", "request.inputs.x", variants=[variant], batchSizes=[1, 2, 4, 8], pin={"replicas": 2})
    document = a_pipeline_document([stage], budget={"cores": "2"}, slo={"latency": SLO})
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def ejected(served: Up) -> dict[str, bool]:
    """Whether each replica is ejected, by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{served.admin_port}/metrics", timeout=5) as response:
        text = response.read().decode()
    found = re.findall(r'^trimtab_replica_ejected\{.*replica="([^"]+)".*\} (\S+)$', text, re.MULTILINE)
    return {replica: value == "1.0" for replica, value in found}


@pytest.mark.parametrize("kind", ["error", "slow"])
def test_outlier_is_ejected_and_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figures: Figures, kind: str
) -> None:
    monkeypatch.setenv("FAULTS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pipeline, out = write_pipeline(tmp_path), tmp_path / "load"
    with up(tmp_path, run_folder=tmp_path / "run", pipeline=pipeline) as served:
        command = command_tied_to_parent("trimtab", "loadtest", str(pipeline), "--load", f"constant:{RATE_RPS}")
        command += ["--duration", str(SECONDS), "--address", f"127.0.0.1:{served.rest_port}", "--out", str(out)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as sending:
            time.sleep(FAULT_AT_SECONDS)
            pid = next(int(path.stem) for path in tmp_path.glob("*.served") if psutil.pid_exists(int(path.stem)))
            fault, faulty_at = tmp_path / f"{pid}.fault", time.time()
            fault.write_text(kind)
            time.sleep(WELL_AT_SECONDS - FAULT_AT_SECONDS)
            during, well_at = ejected(served), time.time()
            fault.unlink()
            while any(ejected(served).values()) and time.time() < well_at + 2 * MAX_RETURN_SECONDS:
                time.sleep(0.1)
            returned_seconds = time.time() - well_at
            assert sending.wait() == 0
        served.stop()
    results = Results.load(out)
    since = results.records["scheduled"] + results.facts.started_at - faulty_at
    failed = since[results.records["outcome"] > DROPPED]
    settled = results.records["outcome"][since > LEARNING_SECONDS]
    late_share = float(np.mean(settled != OK))
    last_failed_seconds = float(max(failed, default=0.0))
    figures.add(requests=len(since), failed=failed.size, last_failed_seconds=last_failed_seconds)
    figures.add(late_share=late_share, returned_seconds=returned_seconds)

    figures.require("failed requests", failed.size, "<=", MAX_FAILED)
    figures.require("seconds until the last failure", last_failed_seconds, "<=", FAILING_SECONDS)
    figures.require("share not in time after 5 s", late_share, "<=", MAX_LATE_SHARE, depends_on_load=True)
    figures.require("replicas ejected", sum(during.values()), "==", 1)
    figures.require("seconds until it is back", returned_seconds, "<=", MAX_RETURN_SECONDS)
