import numpy as np
import pytest

from tests.model_servers.test_model_adapters import a_spec
from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.model_protocol import select_operating_point, select_outputs, validate_rows
from trimtab_protocol import RequestedOutput, Tensor

SPEC = a_spec(
    inputs=[
        {"name": "image", "datatype": "FP32", "shape": [3, -1]},
        {"name": "sound", "datatype": "INT16", "shape": [], "optional": True},
    ],
    outputs=[{"name": "label", "datatype": "INT64"}],
    maxBatchSize=4,
    operatingPoints=[{"name": "full", "accuracy": 0.9}, {"name": "less", "accuracy": 0.8}],
)


def image(*shape: int, dtype: str = "f4", name: str = "image") -> Tensor:
    return Tensor.of(name, np.zeros(shape, dtype))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_rows_up_to_the_maximum_pass(rows):
    assert validate_rows(SPEC, [image(rows, 3, 5)]) == rows
    assert validate_rows(SPEC, [image(rows, 3, 9), image(rows, dtype="i2", name="sound")]) == rows


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([], "input 'image' is missing; send FP32 [rows, 3, any]"),
        ([image(1, 3, 5), image(1, 3, 5, name="picture")], "has no input 'picture'; it reads: image, sound"),
        ([image(1, 3, 5, dtype="f8")], "input 'image' came as FP64; send FP32 [rows, 3, any]"),
        ([image(1, 4, 5)], "input 'image' has shape [1, 4, 5]; send FP32 [rows, 3, any]"),
        ([image(3, 5)], "input 'image' has shape [3, 5]; send FP32 [rows, 3, any]"),
        ([image()], "input 'image' has shape []; send FP32 [rows, 3, any]"),
        ([image(0, 3, 5)], "the batch is empty; send 1 to 4 rows"),
        ([image(5, 3, 5)], "5 rows exceed the maximum batch; send 1 to 4"),
        (
            [image(2, 3, 5), image(3, dtype="i2", name="sound")],
            "all inputs must have the same number of rows, but: image 2, sound 3",
        ),
    ],
)
def test_invalid_tensors_are_client_errors(tensors, message):
    with pytest.raises(RefusalError) as refusal:
        validate_rows(SPEC, tensors)
    assert refusal.value.status_code == 400
    assert message in str(refusal.value)
    assert "model 'small'" in str(refusal.value)


def test_nan_is_valid():
    tensor = Tensor.of("image", np.full((1, 3, 5), np.nan, "f4"))
    assert validate_rows(SPEC, [tensor]) == 1


def test_operating_points():
    assert select_operating_point(SPEC, {}).name == "full"
    assert select_operating_point(SPEC, {"operating_point": "less"}).name == "less"
    with pytest.raises(RefusalError, match="no operating point 'more'; it has: full, less") as refusal:
        select_operating_point(SPEC, {"operating_point": "more"})
    assert refusal.value.status_code == 400


def test_requested_outputs():
    assert select_outputs(SPEC, ()) == ("label",)
    with pytest.raises(RefusalError, match="no output 'box'; it has: label") as refusal:
        select_outputs(SPEC, (RequestedOutput("box"),))
    assert refusal.value.status_code == 400
