"""Conditions of the machine for the simulator, from a served load with all modalities."""

import numpy as np
from numpy.typing import NDArray

from benchmarks.modalities.run import Run
from benchmarks.modalities.setting import STAGE, VARIANT
from benchmarks.simulator.calibration import excess_law, first_of_each_batch
from trimtab_adapter.simulation.environment import Environment
from trimtab_adapter.simulation.sampling import interpolate_latency
from trimtab_pipelines.profile import PointProfile


def conditions_of(run: Run, point: PointProfile) -> Environment:
    """How long batches and requests took beside what is thought of them.

    Args:
        run: a load whose rows all went to one point.
        point: what is thought of it.

    Raises:
        ValueError: not one job was answered, so that nothing is known of the machine.
    """
    answered = run.results.answered
    told = answered[~np.isnan(answered[f"service_seconds:{STAGE}"]) & (answered[f"batch_size:{STAGE}"] > 0)]
    if not told.size:
        raise ValueError(f"{run.method} answered none of {run.jobs} jobs at {run.jobs_rps:.3g}/s: the load is too much")
    inside = told[f"queue_seconds:{STAGE}"] + told[f"service_seconds:{STAGE}"]
    outside = told["latency_seconds"] - inside - (told["sent"] - told["scheduled"])
    batches = told[first_of_each_batch(told, STAGE)]
    sizes: NDArray[np.int32] = batches[f"batch_size:{STAGE}"]
    thought = np.array([interpolate_latency(point, size, 0.5) for size in sizes.tolist()])
    law = excess_law(np.log(batches[f"service_seconds:{STAGE}"] / thought), sizes)
    key = (STAGE, VARIANT)
    return Environment(
        before_seconds=max(float(np.median(outside)), 0.0),
        factors={key: tuple(law.factors.tolist())},
        service_ratios={key: law.ratio},
        size_ratios={key: law.by_size},
    )
