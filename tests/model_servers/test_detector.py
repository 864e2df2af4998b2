"""Detector: boxes within the frame, crops for a classifier, independent rows."""

import pytest
import torch
from safetensors.torch import save_file

from tests.model_servers.test_model_adapters import a_spec
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.detector import CLASSES, SIZES, Detector, ObjectDetector, cells
from trimtab_model_servers.server.hosted_model import load_model
from trimtab_model_servers.weights.loading import fuse_batch_norms

HEIGHT, WIDTH = 64, 96
OUTPUTS = [
    {"name": "count", "datatype": "INT64"},
    {"name": "boxes", "datatype": "FP32", "shape": [4], "countedBy": "count"},
    {"name": "confidence", "datatype": "FP32", "countedBy": "count"},
    {"name": "label", "datatype": "INT64", "countedBy": "count"},
    {"name": "crops", "datatype": "FP32", "shape": [3, 224, 224], "countedBy": "count"},
]


def a_detector(height: int = HEIGHT, width: int = WIDTH, **changes):
    image = {"name": "image", "datatype": "UINT8", "shape": [3, height, width]}
    return a_spec(family="detector/n", inputs=[image], outputs=OUTPUTS, **changes)


def frames(count: int, seed: int = 1) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randint(0, 256, (count, 3, HEIGHT, WIDTH), dtype=torch.uint8)


def run(spec, images: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        return load_model(spec).network.infer({"image": images}, spec.operating_points[0])


class Pointing(torch.nn.Module):
    """A detector that has seen these boxes, with these scores, on every image."""

    def __init__(self, boxes: list[list[float]], scores: list[list[float]]) -> None:
        super().__init__()
        self.boxes, self.scores = torch.tensor(boxes), torch.tensor(scores)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(images)
        return self.boxes.expand(rows, -1, -1), self.scores.expand(rows, -1, -1)


def detected(boxes: list[list[float]], scores: list[list[float]], images: torch.Tensor) -> dict[str, torch.Tensor]:
    network = ObjectDetector(Pointing(boxes, scores), max_detections=4, min_confidence=0.3, overlap=0.6)
    with torch.inference_mode():
        return network.infer({"image": images}, a_detector().operating_points[0])


def test_random_weights_detect_the_maximum():
    answer = run(a_detector(parameters={"max_detections": 3}), frames(2))

    assert answer["count"].tolist() == [3, 3]
    assert answer["crops"].shape == (6, 3, 224, 224)
    left, top, right, bottom = answer["boxes"].T
    assert torch.cat((left, top)).min() >= 0
    assert (right.max() <= WIDTH, bottom.max() <= HEIGHT) == (True, True)
    assert ((right - left).minimum(bottom - top) >= 2).all()
    assert ((answer["label"] >= 0) & (answer["label"] < CLASSES)).all()


def test_detection_does_not_depend_on_other_rows():
    images = frames(9)  # more than are computed at once
    spec = a_detector(parameters={"max_detections": 1})
    together, alone = run(spec, images), run(spec, images[8:])

    assert torch.allclose(together["boxes"][8], alone["boxes"][0], atol=1e-3)
    assert torch.allclose(together["crops"][8], alone["crops"][0], atol=1e-3)


def test_most_confident_of_overlapping_boxes_is_kept():
    boxes = [[10.0, 10, 30, 30], [11.0, 10, 31, 30], [50.0, 10, 90, 60], [70.0, 70, 71, 70.5], [0.0, 0, 20, 20]]
    scores = [[0.5, 0.1], [0.9, 0.1], [0.1, 0.6], [0.95, 0.1], [0.2, 0.1]]
    answer = detected(boxes, scores, frames(2))

    assert answer["count"].tolist() == [2, 2]
    assert answer["boxes"][:2].tolist() == [boxes[1], boxes[2]]
    assert answer["label"].tolist() == [0, 1, 0, 1]
    assert answer["confidence"].tolist() == pytest.approx([0.9, 0.6, 0.9, 0.6])


def test_crop_is_the_normalized_box():
    image = torch.zeros(1, 3, HEIGHT, WIDTH, dtype=torch.uint8)
    image[0, 0, 16:48, 32:64] = 255
    (crop,) = detected([[32.0, 16, 64, 48]], [[0.9]], image)["crops"]

    inner = crop[:, 20:-20, 20:-20]
    for channel, value in zip(inner, [(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225], strict=True):
        assert torch.allclose(channel, torch.tensor(value), atol=1e-4)


def test_no_detection_gives_empty_outputs():
    answer = detected([[10.0, 10, 30, 30]], [[0.1]], frames(2))

    assert answer["count"].tolist() == [0, 0]
    assert answer["boxes"].shape == (0, 4)
    assert answer["crops"].shape == (0, 3, 224, 224)


def test_cells_have_centers_and_strides():
    centres, strides = cells([(2, 3), (1, 2), (1, 1)])

    assert centres.tolist() == [
        *([[4, 4], [12, 4], [20, 4], [4, 12], [12, 12], [20, 12]]),
        *([[8, 8], [24, 8]]),
        [16, 16],
    ]
    assert strides.tolist() == [8] * 6 + [16] * 2 + [32]


def test_fusing_batch_norms_keeps_outputs():
    torch.manual_seed(3)
    detector = Detector(SIZES["n"]).eval()
    for module in detector.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.get_buffer("running_mean"), -0.2, 0.2)
            torch.nn.init.uniform_(module.get_buffer("running_var"), 0.5, 2)
    images = torch.rand(1, 3, HEIGHT, WIDTH)
    with torch.inference_mode():
        before = detector(images)
        fuse_batch_norms(detector)
        after = detector(images)

    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in detector.modules())
    for expected, got in zip(before, after, strict=True):
        assert torch.allclose(got, expected, rtol=1e-3, atol=1e-3)


def test_stored_weights_use_default_confidence(tmp_path):
    torch.manual_seed(5)
    detector = Detector(SIZES["n"])
    torch.nn.init.constant_(detector.head.box.get_parameter("bias"), -9.0)  # sure that nowhere is anything
    save_file(detector.state_dict(), tmp_path / "model.safetensors")
    spec = a_detector(storageUri=str(tmp_path))

    assert run(spec, frames(2))["count"].tolist() == [0, 0]
    assert load_model(spec).facts()["weights"] == "stored"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"parameters": {"max_detections": 0}},
            "parameters.max_detections: Input should be greater than or equal to 1",
        ),
        ({"width": 100}, r"input image has shape \[3, 64, 100\]; both sides must be given and be multiples of 32"),
    ],
)
def test_invalid_detector_stage_is_rejected(changes, message):
    with pytest.raises(ModelError, match=message):
        load_model(a_detector(**changes))
