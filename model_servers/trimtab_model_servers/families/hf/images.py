"""Image tasks: classification, detection, classification by given labels, and embeddings of image files."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL.Image import Image
from pydantic import Field

from trimtab_model_servers.families.hf.checkpoint import Checkpoint, TaskParameters
from trimtab_model_servers.families.hf.payloads import counts, decode_images, encode_images, encode_texts
from trimtab_model_servers.families.hf.task import Task, Tensors, best_labels, embeddings, probabilities
from trimtab_pipelines.operating_point import OperatingPoint


class ImageTask(Task):
    """A model that reads one image file per row."""

    medium = "image"
    example_size = 224

    def __init__(self, checkpoint: Checkpoint, parameters: Any) -> None:
        self.processor = checkpoint.image_processor()
        super().__init__(checkpoint, parameters)

    def encode(self, images: Any) -> Any:
        """Pixels, and masks if images differ in size, on the model's device and in its precision."""
        return self.processor(images=images, return_tensors="pt").to(self.model.device, self.model.dtype)


class ImageClassification(ImageTask):
    """The likeliest label of each image, with its probability."""

    auto_class = "AutoModelForImageClassification"
    compiles = True

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        logits = self.model(**self.encode(decode_images("image", inputs["image"]))).logits.float()
        return best_labels(self.model.config.id2label, probabilities(self.model.config, logits))


class DetectionParameters(TaskParameters):
    """Settings of detection."""

    threshold: float = Field(default=0.5, ge=0, le=1, description="Minimum score of an object")
    max_objects: int = Field(default=100, ge=1, le=1000, description="Maximum objects per image, by score")


class ObjectDetection(ImageTask):
    """The objects in each image: label, score, box as xmin, ymin, xmax, ymax in pixels of the file, and the cut-out."""

    auto_class = "AutoModelForObjectDetection"
    parameters = DetectionParameters

    def __init__(self, checkpoint: Checkpoint, parameters: DetectionParameters) -> None:
        super().__init__(checkpoint, parameters)
        self._settings, self._crops = parameters, "crop" in checkpoint.outputs

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        images = decode_images("image", inputs["image"])
        output, labels = self.model(**self.encode(images)), self.model.config.id2label
        sizes = [(image.height, image.width) for image in images]
        detect = self.processor.post_process_object_detection
        rows = [self._best(row) for row in detect(output, threshold=self._settings.threshold, target_sizes=sizes)]
        answers = {
            "objects": counts(len(row["scores"]) for row in rows),
            "label": encode_texts(labels[index] for row in rows for index in row["labels"].tolist()),
            "score": torch.cat([row["scores"] for row in rows]).float(),
            "box": torch.cat([row["boxes"] for row in rows]).float(),
        }
        if self._crops:
            parts = (crop(image, box) for image, row in zip(images, rows, strict=True) for box in row["boxes"].tolist())
            answers["crop"] = encode_images(parts)
        return answers

    def _best(self, row: Tensors) -> Tensors:
        chosen = row["scores"].topk(min(self._settings.max_objects, len(row["scores"]))).indices
        return {name: values[chosen] for name, values in row.items()}


def crop(image: Image, box: Sequence[float]) -> Image:
    """The part of an image inside a box, at least one pixel."""
    left, top = (min(max(round(low), 0), size - 1) for low, size in zip(box[:2], image.size, strict=True))
    right, bottom = (max(min(round(high), size), 1) for high, size in zip(box[2:], image.size, strict=True))
    return image.crop((left, top, max(right, left + 1), max(bottom, top + 1)))


class ZeroShotParameters(TaskParameters):
    """Settings of classification by given labels."""

    labels: str = Field(min_length=1, max_length=65536, description="Labels to choose from, separated by commas")
    template: str = Field(default="This is a photo of {}.", description="Text of a label, with {} for the label")


class ZeroShotImageClassification(ImageTask):
    """The likeliest of the variant's labels for each image, by a model of image-text similarity such as CLIP."""

    auto_class = "AutoModelForZeroShotImageClassification"
    parameters = ZeroShotParameters

    def __init__(self, checkpoint: Checkpoint, parameters: ZeroShotParameters) -> None:
        super().__init__(checkpoint, parameters)
        labels = [label.strip() for label in parameters.labels.split(",") if label.strip()]
        self._labels = dict(enumerate(labels))
        texts = [parameters.template.replace("{}", label) for label in labels]
        padding = "max_length" if "siglip" in self.model.config.model_type else True
        self._texts = checkpoint.tokenizer()(texts, padding=padding, return_tensors="pt")

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        images = self.encode(decode_images("image", inputs["image"]))
        logits = self.model(**images, **self._texts.to(self.model.device)).logits_per_image.float()
        siglip = "siglip" in self.model.config.model_type
        return best_labels(self._labels, logits.sigmoid() if siglip else logits.softmax(dim=-1))


class ImageEmbeddingParameters(TaskParameters):
    """Settings of image embeddings."""

    normalize: bool = Field(default=True, description="Scale embeddings to length 1")


class ImageEmbedding(ImageTask):
    """An embedding of each image: the projected features of an image-text model, else the pooled state."""

    auto_class = "AutoModel"
    parameters = ImageEmbeddingParameters

    def __init__(self, checkpoint: Checkpoint, parameters: ImageEmbeddingParameters) -> None:
        super().__init__(checkpoint, parameters)
        self._normalize = parameters.normalize

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        images = self.encode(decode_images("image", inputs["image"]))
        features = getattr(self.model, "get_image_features", self.model)(**images)
        pooled = getattr(features, "pooler_output", features).float()
        return embeddings(pooled, normalize=self._normalize)
