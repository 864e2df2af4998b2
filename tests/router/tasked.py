"""Pipeline whose stage reads the task of each row, and a replica that returns the task index it receives."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.builders import a_stage, a_variant
from tests.router.fakes import FakeReplica, a_pipeline
from trimtab_pipelines.spec import InferencePipeline

NO_INDEX = -7.0


def a_tasked_pipeline(*, optional: bool = True, **variant: Any) -> InferencePipeline:
    """One that takes x FP32 [4] and task INT64 [] and gives y FP32 [4]."""
    may: dict[str, Any] = {"optional": True} if optional else {}
    task_input = {"name": "task", "from": "request.inputs.task", **may}
    reads = [{"name": "x", "from": "request.inputs.x"}, task_input]
    stage = a_stage("stage-0", inputs=reads, variants=[a_variant(**variant)])
    given = [{"name": "x", "datatype": "FP32", "shape": [4]}, {"name": "task", "datatype": "INT64", "shape": [], **may}]
    return a_pipeline([stage], inputs=given)


def echo_task_index(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the task index of each row."""
    task = inputs.get("task", np.full(len(inputs["x"]), NO_INDEX))
    return {"y": np.repeat(task.astype(np.float32)[:, None], 4, axis=1)}


def a_tasked_replica(tasks: Sequence[str], name: str = "replica-0", **changes: Any) -> FakeReplica:
    """One that has these tasks, by number."""
    return FakeReplica(model=echo_task_index, name=name, facts=lambda: {"tasks": ",".join(tasks)}, **changes)
