"""Fake candidate model of `trimtab tune`: given latencies on a fake clock, and labels that are all correct."""

from typing import Any

import torch

from trimtab.tuning.measurement import QualityEvaluator, TimeBudget, Timer
from trimtab_loadtester.payloads.interface import Payload, Score
from trimtab_pipelines.operating_point import OperatingPoint, TokenMerging

COMPILED = {"full-compiled": 0.9, "half-compiled": 0.49, "third-compiled": 0.33}
KNOBS: dict[str, dict[str, Any]] = {
    "full-bf16": {"precision": "BF16"},
    "half-bf16": {"precision": "BF16", "merging": TokenMerging(schedule=(1,))},
    "full-int8": {"precision": "INT8"},
}
ROW_SECONDS = {"full": 1.0, "slow": 1.5, "half": 0.5, "third": 0.3, "quarter": 0.25}


class FakeModel:
    """Fake of `CandidateModel` and of `LabelledPayloads`."""

    def __init__(self, row_seconds):
        self.now, self.row_seconds = 0.0, row_seconds
        self.points = [OperatingPoint(name=name, accuracy=0, **KNOBS.get(name, {})) for name in row_seconds]
        self.labelled = True

    def clock(self):
        return self.now

    def rows(self, payloads):
        return payloads

    def run(self, payloads, point):
        self.now += len(payloads) * self.row_seconds[point.name]
        return {"label": torch.zeros(len(payloads))}, None

    def payload(self, _index):
        return Payload(())

    def score(self, _truth, _outputs):
        return Score(1, 1)

    def task(self, _index):
        return ""

    def tasks(self, _count):
        return ()

    def digest(self):
        return "sha256:" + 64 * "0"

    def spec_at(self, point):
        return point

    def add_point(self, point, _like, _folder):
        self.row_seconds[point.name] = COMPILED[point.name]


def with_tools(model: Any, seconds: float) -> tuple[Any, QualityEvaluator, Timer]:
    timer = Timer(model, [model.payload(index) for index in range(8)], lambda _: None, TimeBudget(seconds, model.clock))
    return model, QualityEvaluator(model, model, 80, 8), timer
