"""`detector/n` to `detector/x`: UINT8 [B, 3, H, W] to the detected objects, with crops for a classifier.

H and W are multiples of 32. The crops are normalized for torchvision's classifiers: FP32 [N, 3, 224, 224]. The network
is a single-stage, anchor-free detector in five sizes. It shares no code with YOLOv5, but matches the parameter counts
of its five sizes (IPA, table 7), and its operations within a fifth, so that a stage costs as much as the paper's. A
backbone of residual stages, each with half the resolution and twice the channels, feeds its last three stages into a
top-down pyramid; one head, shared by the three levels, predicts for each cell an objectness, a class and the distances
from the cell's center to the sides of a box.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torchvision.ops import batched_nms, clip_boxes_to_image, roi_align

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.interfaces import Built, Parameters, read_parameters
from trimtab_model_servers.transformer.config import FIXED
from trimtab_model_servers.weights.loading import build_with_weights, fuse_batch_norms
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

CLASSES = 80
STRIDES = (8, 16, 32)
COARSEST = STRIDES[-1]
CANDIDATES = 300
CROP_PIXELS = 224
MAX_IMAGES = 8  # the first layers take up to 37 MB per frame; larger batches are no faster on CPUs
MIN_SIDE_PIXELS = 2.0
CLASSIFIER_MEAN, CLASSIFIER_DEVIATION = FIXED["ImageNet"]


@dataclass(frozen=True, slots=True)
class Size:
    """Width and depth of a detector."""

    stem: int
    """Channels of the first convolution; the stages have 2, 4, 8 and 16 times as many."""
    depths: tuple[int, int, int, int]
    """Residual blocks of the four stages."""
    pyramid: int
    """Channels of the pyramid and the head."""


SIZES = {
    "n": Size(stem=16, depths=(1, 2, 4, 3), pyramid=40),
    "s": Size(stem=32, depths=(1, 2, 4, 3), pyramid=48),
    "m": Size(stem=56, depths=(1, 2, 3, 3), pyramid=96),
    "l": Size(stem=80, depths=(1, 2, 4, 3), pyramid=192),
    "x": Size(stem=120, depths=(1, 2, 5, 2), pyramid=160),
}


class Convolution(nn.Module):
    """Convolution, batch norm, SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        return nn.functional.silu(self.norm(self.conv(x)), inplace=True)


class Residual(nn.Module):
    """A bottleneck of half the channels with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = Convolution(channels, channels // 2, 1)
        self.expand = Convolution(channels // 2, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast("Tensor", self.expand(self.squeeze(x)))


class Head(nn.Module):
    """Predictions of each cell of a level: objectness, class scores, and a box."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.what = nn.Sequential(Convolution(channels, channels, 3), Convolution(channels, channels, 3))
        self.where = nn.Sequential(Convolution(channels, channels, 3), Convolution(channels, channels, 3))
        self.classes = nn.Conv2d(channels, CLASSES, 1)
        self.box = nn.Conv2d(channels, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, channels, H, W] to [B, H · W, 5 + CLASSES]: distances, objectness and class logits."""
        predictions = torch.cat((self.box(self.where(x)), self.classes(self.what(x))), dim=1)
        return predictions.flatten(2).transpose(1, 2)


class Detector(nn.Module):
    """Backbone, pyramid and head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        widths = [size.stem << level for level in range(5)]
        self.stem = Convolution(3, size.stem, 3, stride=2)
        self.stages = nn.ModuleList(
            nn.Sequential(Convolution(inputs, outputs, 3, stride=2), *(Residual(outputs) for _ in range(depth)))
            for (inputs, outputs), depth in zip(pairwise(widths), size.depths, strict=True)
        )
        self.laterals = nn.ModuleList(Convolution(width, size.pyramid, 1) for width in widths[2:])
        self.smooths = nn.ModuleList(Convolution(size.pyramid, size.pyramid, 3) for _ in STRIDES)
        self.head = Head(size.pyramid)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Detect on images [B, 3, H, W] of values 0…1, height and width multiples of 32.

        Returns the boxes [B, cells, 4] as left, top, right, bottom in pixels, and the score of each class
        [B, cells, CLASSES].
        """
        x = self.stem(images)
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        levels = self._pyramid(features[1:])
        predictions = torch.cat([self.head(level) for level in levels], dim=1)
        centres, strides = cells([(level.shape[2], level.shape[3]) for level in levels])
        distances = nn.functional.softplus(predictions[..., :4]) * strides[:, None]
        boxes = torch.cat((centres - distances[..., :2], centres + distances[..., 2:]), dim=-1)
        return boxes, predictions[..., 5:].sigmoid() * predictions[..., 4:5].sigmoid()

    def _pyramid(self, stages: list[Tensor]) -> list[Tensor]:
        """Add to each level the features of the coarser ones; finest level first."""
        above: Tensor | None = None
        levels: list[Tensor] = []
        for lateral, smooth, features in reversed(list(zip(self.laterals, self.smooths, stages, strict=True))):
            level = lateral(features)
            if above is not None:
                level = level + interpolate(above, size=level.shape[2:], mode="nearest")
            levels.insert(0, smooth(level))
            above = level
        return levels


def cells(shapes: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Centers [cells, 2] as x, y in pixels and strides [cells] of the three levels' cells, finest level first."""
    centres, strides = [], []
    for (height, width), stride in zip(shapes, STRIDES, strict=True):
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centres.append((torch.stack((columns, rows), dim=-1).reshape(-1, 2) + 0.5) * stride)
        strides.append(torch.full((height * width,), float(stride)))
    return torch.cat(centres), torch.cat(strides)


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
    parameters = read_parameters(DetectorParameters, spec)
    size = SIZES[spec.family.rpartition("/")[2]]
    network, random = build_with_weights(spec, lambda: Detector(size), on_meta=True)
    _require_images(spec)
    fuse_batch_norms(network)
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
