"""Two of IPA's pipelines in a real cluster: miniature checkpoints in MinIO, a load while the variants change."""

import asyncio
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e import faults
from tests.e2e.conftest import NAMESPACE, ROOT, Installation, run
from tests.e2e.load import send
from tests.e2e.observed import READY_SECONDS, served
from tests.figures import Figures
from trimtab.local.load_process import LoadOptions
from trimtab_pipelines.request_outcome import RequestOutcome

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(3600)]

LOAD_RPS, LOAD_SECONDS, PIN_SECONDS = 1, 180.0, 20.0
"""A plan follows a pin within the pipelines' interval of 10 s."""
GENEROUS = {"latency": "30s"}
RESOURCES = {"cpu": "300m", "memory": "1Gi"}


async def write_stored_pipeline(name: str, folder: Path) -> Path:
    """Put miniatures of two variants a stage into MinIO; returns the document that names them."""
    trimtab = (sys.executable, "-m", "trimtab")
    await run(*trimtab, "checkpoints", "tiny", ROOT / "pipelines" / name, "-o", folder)
    document = yaml.safe_load((folder / "pipeline.yaml").read_text())
    document["metadata"]["namespace"] = NAMESPACE
    document["spec"] |= {"slo": GENEROUS, "budget": {"cores": str(0.3 * len(document["spec"]["stages"]))}}
    for stage in document["spec"]["stages"]:
        stage["variants"] = [variant | {"resources": RESOURCES} for variant in stage["variants"][:2]]
        stage["batchSizes"] = [1, 4]
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(document))
    stored = folder / "stored.yaml"
    await run(*trimtab, "push", folder, f"s3://{faults.BUCKET}/{name}", "-o", stored)
    document = yaml.safe_load(stored.read_text())
    for stage in document["spec"]["stages"]:
        stage["variants"] = [variant | {"secretName": faults.SECRET} for variant in stage["variants"]]
    stored.write_text(yaml.safe_dump(document))
    return stored


async def pin_variants_in_turn(installation: Installation, document: dict[str, Any], seconds: float) -> int:
    """Pin the variants of all stages one after the other; returns the number of changes."""
    end = time.monotonic() + seconds
    for number in itertools.count(1):
        for stage in document["spec"]["stages"]:
            stage["pin"] = {"variant": stage["variants"][number % len(stage["variants"])]["name"]}
        await installation.apply(document)
        await asyncio.sleep(PIN_SECONDS)
        if time.monotonic() > end:
            break
    return number


@pytest.mark.parametrize("name", ["video", "audio-sent"])
async def test_pipeline_of_checkpoints_serves_from_minio(
    installation: Installation, name: str, tmp_path: Path, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in (await faults.start_minio(installation)).items():
        monkeypatch.setenv(key, value)
    stored = await write_stored_pipeline(name, tmp_path)
    document = yaml.safe_load(stored.read_text())
    options = LoadOptions(
        f"constant:{LOAD_RPS}", duration_seconds=LOAD_SECONDS, access=installation.credentials.access()
    )
    async with served(installation, document, READY_SECONDS) as pipeline:
        results, pins = await asyncio.gather(
            send(stored, pipeline.address, options),
            pin_variants_in_turn(installation, document, LOAD_SECONDS - PIN_SECONDS),
        )
        state = await pipeline.state()

    figures.add(pins=pins, **{outcome.word: results.count(outcome) for outcome in RequestOutcome})
    assert {stage: found.variant for stage, found in state.stages.items()} == {
        stage["name"]: stage["pin"]["variant"] for stage in document["spec"]["stages"]
    }
    assert results.count(RequestOutcome.FAILED) == 0
    assert results.count(RequestOutcome.OK) > 0
