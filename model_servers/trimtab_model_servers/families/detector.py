"""`detector/n` to `detector/x`: UINT8 [B, 3, H, W] to the detected objects, with crops for a classifier.

H and W are multiples of 32. The crops are normalized for torchvision's classifiers: FP32 [N, 3, 224, 224].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import Field
from torchvision.ops import batched_nms, clip_boxes_to_image, roi_align

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.detection import COARSEST, SIZES, Detector, fuse_batch_norms
from trimtab_model_servers.families.interfaces import Built
from trimtab_model_servers.families.parameters import Parameters, read_parameters
from trimtab_model_servers.transformer.image_preprocessing import FIXED
from trimtab_model_servers.weights import load_weights
from trimtab_model_servers.weights_source import RandomSeed, find_weights
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

CANDIDATES = 300
CROP_PIXELS = 224
MAX_IMAGES = 8  # the first layers take up to 37 MB per frame; larger batches are no faster on CPUs
MIN_SIDE_PIXELS = 2.0
CLASSIFIER_MEAN, CLASSIFIER_DEVIATION = FIXED["ImageNet"]


class DetectorParameters(Parameters):
    """Settings of the family."""

    max_detections: int = Field(default=8, ge=1, le=64, description="Maximum objects per image")
    min_confidence: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Minimum confidence of an object; by default 0.25, or 0 with random weights",
    )
    overlap: float = Field(default=0.6, gt=0, le=1, description="Maximum IoU of two boxes of a class")


@dataclass(frozen=True, slots=True)
class ObjectDetector:
    """A detector that also returns crops of the objects, so that frames are not sent twice."""

    network: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    max_detections: int
    min_confidence: float
    overlap: float

    def infer(self, inputs: dict[str, torch.Tensor], point: OperatingPoint) -> dict[str, torch.Tensor]:
        """Map `image` [B, 3, H, W] to `count` [B], `boxes` [N, 4], `confidence` [N], `label` [N] and `crops`.

        Boxes are left, top, right, bottom in pixels, by descending confidence within an image; N is the sum of `count`.
        """
        del point  # a single operating point
        image = inputs["image"].to(torch.float32).div_(255)
        height, width = image.shape[2:]
        if height % COARSEST or width % COARSEST:
            raise ValueError(f"images of {height} × {width} pixels: both sides must be multiples of {COARSEST}")
        detections = [
            self._select(cell_boxes, scores, (height, width))
            for batch in torch.split(image.contiguous(memory_format=torch.channels_last), MAX_IMAGES)
            for cell_boxes, scores in zip(*self.network(batch), strict=True)
        ]
        boxes = [image_boxes for image_boxes, _, _ in detections]
        return {
            "count": torch.tensor([len(image_boxes) for image_boxes in boxes], dtype=torch.int64),
            "boxes": torch.cat(boxes),
            "confidence": torch.cat([confidence for _, confidence, _ in detections]),
            "label": torch.cat([label for _, _, label in detections]),
            "crops": _crops(image, boxes),
        }

    def _select(
        self, boxes: torch.Tensor, scores: torch.Tensor, pixels: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Select objects from an image's boxes [cells, 4] and scores [cells, classes]: boxes, confidences, labels."""
        confidence, label = scores.max(dim=1)
        confidence, order = confidence.topk(min(CANDIDATES, len(confidence)))
        boxes, label = clip_boxes_to_image(boxes[order], pixels), label[order]
        sides = (boxes[:, 2:] - boxes[:, :2]).amin(dim=1)
        usable = (confidence >= self.min_confidence) & (sides >= MIN_SIDE_PIXELS)
        boxes, confidence, label = boxes[usable], confidence[usable], label[usable]
        selected = batched_nms(boxes, confidence, label, self.overlap)[: self.max_detections]
        return boxes[selected], confidence[selected], label[selected]


def _crops(image: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
    """Crop boxes from images [B, 3, H, W] of values 0…1: [N, 3, 224, 224], normalized."""
    crops: torch.Tensor = roi_align(image, boxes, CROP_PIXELS, sampling_ratio=2, aligned=True)
    mean, deviation = (torch.tensor(channels).view(3, 1, 1) for channels in (CLASSIFIER_MEAN, CLASSIFIER_DEVIATION))
    return crops.sub_(mean).div_(deviation)


def build(spec: ModelSpec) -> Built:
    """Build the detector of the size named by the family's suffix, with stored or random weights."""
    parameters = read_parameters(DetectorParameters, spec)
    size = SIZES[spec.family.rpartition("/")[2]]
    weights = find_weights(spec.storage_uri, spec.digest)
    if isinstance(weights, RandomSeed):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(weights.value)
            network = Detector(size)
    else:
        with torch.device("meta"):
            network = Detector(size)
        load_weights(network, weights)
    _require_images(spec)
    network = network.eval().requires_grad_(requires_grad=False)
    fuse_batch_norms(network)
    random = isinstance(weights, RandomSeed)
    min_confidence = parameters.min_confidence
    served = ObjectDetector(
        network.to(memory_format=torch.channels_last),
        parameters.max_detections,
        (0.0 if random else 0.25) if min_confidence is None else min_confidence,
        parameters.overlap,
    )
    return Built.of(served, random=random)


def _require_images(spec: ModelSpec) -> None:
    for tensor in spec.inputs:
        sides = tensor.shape[1:]
        if tensor.name == "image" and any(side < 1 or side % COARSEST for side in sides):
            raise ModelError(
                f"family {spec.family!r}: input image has shape {list(tensor.shape)}; both sides must be given and be "
                f"multiples of {COARSEST}, as [3, 480, 640]"
            )
