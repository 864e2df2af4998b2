"""Payload sources: real pages with labels, or random tensors of the pipeline's shapes, without duplicates."""

import numpy as np
import pytest

from tests.builders import a_pipeline_document, a_stage
from trimtab_loadtester.payloads.interface import Outputs, Score
from trimtab_loadtester.payloads.sources import DigitPayloads, SyntheticPayloads, payload_source
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.tensors import TensorSpec
from trimtab_training.digits.page_generator import Page


@pytest.mark.parametrize(
    ("datatype", "shape", "expected"),
    [
        ("FP32", (3, -1), (1, 3, 16)),
        ("UINT8", (4,), (1, 4)),
        ("INT64", (), (1,)),
        ("BOOL", (2,), (1, 2)),
        ("BYTES", (2,), (1, 2)),
    ],
)
def test_random_payloads_have_the_declared_shape_and_type(datatype, shape, expected) -> None:
    source = SyntheticPayloads((TensorSpec(name="x", datatype=datatype, shape=shape),), seed=5)

    (tensor,) = source.payload(3).inputs
    assert (tensor.name, tensor.datatype, tensor.shape) == ("x", datatype, expected)
    assert np.array_equal(tensor.array, source.payload(3).inputs[0].array)
    assert source.score(None, {}) == Score(0, 0)


def test_random_payloads_differ() -> None:
    source = SyntheticPayloads((TensorSpec(name="x", datatype="FP32", shape=(8,)),))

    assert len({source.payload(index).inputs[0].array.tobytes() for index in range(50)}) == 50


def test_digit_payloads_have_the_labels_of_the_page() -> None:
    source = DigitPayloads(seed=1)
    payload = source.payload(4)
    (image,) = payload.inputs
    truth = payload.truth
    assert isinstance(truth, Page)

    assert (image.name, image.datatype, image.shape) == ("image", "UINT8", (1, 1, 96, 96))
    right: Outputs = {"boxes": truth.boxes, "digit": truth.labels}
    wrong: Outputs = {"boxes": truth.boxes, "digit": (truth.labels + 1) % 10}
    nothing: Outputs = {"boxes": np.empty((0, 4), np.float32), "digit": np.empty(0, np.int64)}
    digits = len(truth.labels)
    assert source.score(truth, right) == Score(digits, digits)
    assert source.score(truth, wrong) == source.score(truth, nothing) == Score(0, digits)
    with pytest.raises(KeyError, match="boxes"):
        source.score(truth, {"digit": truth.labels})


def test_synthetic_payloads_follow_their_distribution() -> None:
    specs = (
        TensorSpec(name="question", datatype="INT64", shape=(-1,)),
        TensorSpec(name="threshold", datatype="FP32", shape=(2,)),
    )
    inputs = [spec.model_dump(mode="json") for spec in specs]
    document = a_pipeline_document([a_stage(source="request.inputs.threshold")], inputs=inputs)
    document["metadata"]["annotations"] = {"trimtab.dev/payloads": "question=squad-question"}
    source = payload_source(InferencePipeline.model_validate(document), seed=2)

    lengths = set()
    for index in range(20):
        question, threshold = source.payload(index).inputs
        assert (question.shape, threshold.shape) == ((1, 64), (1, 2))
        assert np.array_equal(question.array, source.payload(index).inputs[0].array)
        lengths.add(int((question.array >= 0).sum()))
    assert len(lengths) > 5
    assert source.score(None, {}) == Score(0, 0)
