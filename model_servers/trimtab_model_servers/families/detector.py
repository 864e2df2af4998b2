"""`detector/n` to `detector/x`: UINT8 [B, 3, H, W] to the objects found, and what was cut out for a classifier.

H and W are multiples of 32. The crops are as torchvision's classifiers want them: FP32 [N, 3, 224, 224], normalised.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import Field
from torchvision.ops import batched_nms, clip_boxes_to_image, roi_align

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.detection import COARSEST, SIZES, Detector, merge_normalisations
from trimtab_model_servers.families.interfaces import Built
from trimtab_model_servers.families.parameters import Parameters, read_parameters
from trimtab_model_servers.transformer.image_preprocessing import FIXED
from trimtab_model_servers.weights import load_weights
from trimtab_model_servers.weights_source import RandomSeed, find_weights
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

CANDIDATES = 300
CROP_PIXELS = 224
IMAGES_AT_ONCE = 8  # the first layers of a frame take up to 37 MB each; more at once are no faster on cores
LEAST_SIDE_PIXELS = 2.0
CLASSIFIER_MEAN, CLASSIFIER_DEVIATION = FIXED["ImageNet"]


class DetectorParameters(Parameters):
    """Settings of the family."""

    max_detections: int = Field(default=8, ge=1, le=64, description="Most objects answered for an image")
    min_confidence: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Least confidence of an object; by default 0.25, and 0 with random weights, which know no object",
    )
    overlap: float = Field(default=0.6, gt=0, le=1, description="Of two boxes of a class that overlap more, one stays")


@dataclass(frozen=True, slots=True)
class ObjectDetector:
    """A detector whose objects are cut out at once, so that frames need not travel twice."""

    network: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    max_detections: int
    min_confidence: float
    overlap: float

    def infer(self, inputs: dict[str, torch.Tensor], point: OperatingPoint) -> dict[str, torch.Tensor]:
        """Map `image` [B, 3, H, W] to `count` [B], `boxes` [N, 4], `confidence` [N], `label` [N] and `crops`.

        Boxes are left, top, right, bottom in pixels, the most confident of an image first; N is the sum of `count`.
        """
        del point  # one way to run
        image = inputs["image"].to(torch.float32).div_(255)
        height, width = image.shape[2:]
        if height % COARSEST or width % COARSEST:
            raise ValueError(f"images of {height} × {width} pixels: both sides must be multiples of {COARSEST}")
        found = [
            self._best(boxes, scores, (height, width))
            for some in torch.split(image.contiguous(memory_format=torch.channels_last), IMAGES_AT_ONCE)
            for boxes, scores in zip(*self.network(some), strict=True)
        ]
        every = torch.cat([kept for kept, _, _ in found])
        return {
            "count": torch.tensor([len(kept) for kept, _, _ in found], dtype=torch.int64),
            "boxes": every,
            "confidence": torch.cat([confidence for _, confidence, _ in found]),
            "label": torch.cat([label for _, _, label in found]),
            "crops": _crops(image, [kept for kept, _, _ in found]),
        }

    def _best(
        self, boxes: torch.Tensor, scores: torch.Tensor, pixels: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Choose among an image's boxes [cells, 4] and scores [cells, classes]: boxes, confidences, labels."""
        confidence, label = scores.max(dim=1)
        confidence, order = confidence.topk(min(CANDIDATES, len(confidence)))
        boxes, label = clip_boxes_to_image(boxes[order], pixels), label[order]
        sides = (boxes[:, 2:] - boxes[:, :2]).amin(dim=1)
        usable = (confidence >= self.min_confidence) & (sides >= LEAST_SIDE_PIXELS)
        boxes, confidence, label = boxes[usable], confidence[usable], label[usable]
        kept = batched_nms(boxes, confidence, label, self.overlap)[: self.max_detections]
        return boxes[kept], confidence[kept], label[kept]


def _crops(image: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
    """Cut boxes out of images [B, 3, H, W] of values 0…1: [N, 3, 224, 224], normalised."""
    crops: torch.Tensor = roi_align(image, boxes, CROP_PIXELS, sampling_ratio=2, aligned=True)
    mean, deviation = (torch.tensor(three).view(3, 1, 1) for three in (CLASSIFIER_MEAN, CLASSIFIER_DEVIATION))
    return crops.sub_(mean).div_(deviation)


def build(spec: ModelSpec) -> Built:
    """Build the detector of the size that the family's name ends in, with stored or random weights."""
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
    merge_normalisations(network)
    random = isinstance(weights, RandomSeed)
    least = parameters.min_confidence
    served = ObjectDetector(
        network.to(memory_format=torch.channels_last),
        parameters.max_detections,
        (0.0 if random else 0.25) if least is None else least,
        parameters.overlap,
    )
    return Built(served, "random" if random else "stored")


def _require_images(spec: ModelSpec) -> None:
    for tensor in spec.inputs:
        sides = tensor.shape[1:]
        if tensor.name == "image" and any(side < 1 or side % COARSEST for side in sides):
            raise ModelError(
                f"family {spec.family!r}: input image has shape {list(tensor.shape)}; both sides must be given and be "
                f"multiples of {COARSEST}, as [3, 480, 640]"
            )
