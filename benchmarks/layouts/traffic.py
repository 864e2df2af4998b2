"""Chats as a production cluster gets them, calm and then in a burst of images, at rates that do not change.

The load tester sends them: texts and images as two processes, none to sixteen images a chat, answers checked.
"""

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from trimtab_loadtester.attack import AttackOptions, attack_async
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_loadtester.multimodal.traffic import Traffic
from trimtab_loadtester.results import Results
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.request_outcome import RequestOutcome

RPS: Final = 4.0
HALF_SECONDS: Final = 30
"""Of calm, and of the burst after it."""
SEED: Final = 99


async def calm_and_burst(pipeline: Path, port: int, *, rps: float = RPS, seconds: int = HALF_SECONDS) -> Results:
    """Send both to the door of a pipeline that is served."""
    load = calm_then_burst(rps, seconds)
    options = AttackOptions(protocol="chat", duration_seconds=2.0 * seconds, seed=SEED)
    return await attack_async(load_pipeline(pipeline), f"127.0.0.1:{port}", load, options)


def calm_then_burst(rps: float, seconds: int) -> LoadSpec:
    """So many seconds without a burst, and as many in one."""
    bursts = np.arange(2 * seconds) >= seconds
    traffic = replace(Traffic.split(np.full(2 * seconds, rps), bursts=bursts), interval_seconds=1.0)
    return LoadSpec.of_traffic(traffic, f"{rps:g} chats a second, in a burst of images from second {seconds} on")


def figures(results: Results, seconds: int) -> dict[str, float]:
    """By calm and burst, and by modality: what was promised and kept, and when first tokens came."""
    found: dict[str, float] = {}
    for name, begins in (("calm", 0), ("burst", seconds)):
        due = results.records["scheduled"]
        part = Results(results.facts, results.records[(due >= begins) & (due < begins + seconds)])
        found[f"{name}_images"] = float(part.records["images"].sum())
        for modality, seen in part.modalities().items():
            found[f"{name}_{modality}_kept_fraction"] = round(seen.slo_fraction, 4)
            if "first_token_seconds_p99" in seen.tokens:
                found[f"{name}_{modality}_first_token_p99_seconds"] = seen.tokens["first_token_seconds_p99"]
    return found | {"failed": results.count(RequestOutcome.FAILED), "answered": len(results.answered)}
