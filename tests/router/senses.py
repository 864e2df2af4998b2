"""A pipeline that answers from sound, image or both, its fake replica, and jobs for it."""

from typing import Any

import numpy as np

from tests.builders import a_stage, a_variant
from tests.router.fakes import FakeReplica, a_pipeline
from trimtab_protocol import InferRequest, Tensor

ACCURACY = {"all": 0.9, "image": 0.8, "sound": 0.6}
READS = {"image": ["image"], "sound": ["sound"]}
"""Of the points that leave an input out."""
OUTPUTS = [{"name": "y", "datatype": "FP32"}]
PLAN: dict[str, Any] = {
    "operatingPoint": "all",
    "serviceSeconds": {1: 0.02, 8: 0.04},
    "fallbacks": [
        {"name": name, "accuracy": ACCURACY[name], "inputs": reads, "serviceSeconds": {1: 0.01, 8: 0.02}}
        for name, reads in READS.items()
    ],
}


class Sensing(FakeReplica):
    """Remembers at which point it served which inputs; finds fault with a batch that holds 13."""

    def __init__(self):
        super().__init__(model=self.compute, refuse=self.cursed)
        self.inputs: list[tuple[str, list[str]]] = []

    def compute(self, inputs):
        self.inputs.append((str(self.seen[-1].parameters["operating_point"]), sorted(inputs)))
        return {"y": next(iter(inputs.values()))[:, 0]}

    def cursed(self, inputs):
        return (400, "an item is corrupt") if any((array == 13).any() for array in inputs.values()) else None


def a_sensing_pipeline(**changes):
    given = [{"name": name, "from": f"request.inputs.{name}", "optional": True} for name in READS]
    points = [{"name": name, "accuracy": accuracy} for name, accuracy in ACCURACY.items()]
    points = [point | ({"modalities": READS[point["name"]]} if point["name"] in READS else {}) for point in points]
    stage = a_stage("stage-0", inputs=given, outputs=OUTPUTS, variants=[a_variant(operatingPoints=points)])
    declared = [{"name": name, "datatype": "FP32", "shape": [2], "optional": True} for name in READS]
    return a_pipeline([stage], inputs=declared, **{"schedulingPolicy": "ModalityMix"} | changes)


def a_job(rows=1, names=("image", "sound"), value=1.0, **parameters):
    inputs = tuple(Tensor.of(name, np.full((rows, 2), value, np.float32)) for name in names)
    return InferRequest("sample", inputs, parameters=parameters)
