"""Image tasks: classification, detection, classification by given labels, and embeddings of image files."""

from typing import Any, ClassVar

import torch
from pydantic import Field

from trimtab_model_servers.families.hf.checkpoint import Checkpoint, TaskParameters
from trimtab_model_servers.families.hf.payloads import counts, decode_images, encode_texts, example_image
from trimtab_model_servers.families.hf.text import Declared, Tensors, best_labels, probabilities
from trimtab_pipelines.operating_point import OperatingPoint


class ImageTask:
    """A model that reads one image file per row."""

    auto_class: ClassVar[str]
    inputs: ClassVar[Declared] = {"image": ("BYTES", ())}
    outputs: ClassVar[Declared]
    parameters: ClassVar[type[TaskParameters]] = TaskParameters

    def __init__(self, checkpoint: Checkpoint, parameters: Any) -> None:
        self.processor = checkpoint.image_processor()
        self.model = checkpoint.model(self.auto_class, parameters.precision)

    def move_to(self, device: torch.device) -> None:
        self.model.to(device)

    def example(self, name: str) -> bytes:
        del name
        return example_image()

    def encode(self, images: Any) -> Any:
        """Pixels, and masks if images differ in size, on the model's device and in its precision."""
        return self.processor(images=images, return_tensors="pt").to(self.model.device, self.model.dtype)


class ImageClassification(ImageTask):
    """The likeliest label of each image, with its probability."""

    auto_class = "AutoModelForImageClassification"
    outputs: ClassVar[Declared] = {"label": ("BYTES", ()), "score": ("FP32", ())}

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        logits = self.model(**self.encode(decode_images("image", inputs["image"]))).logits.float()
        return best_labels(self.model.config, probabilities(self.model.config, logits))


class DetectionParameters(TaskParameters):
    """Settings of detection."""

    threshold: float = Field(default=0.5, ge=0, le=1, description="Minimum score of an object")


class ObjectDetection(ImageTask):
    """The objects in each image: label, score, and box as xmin, ymin, xmax, ymax in pixels of the file."""

    auto_class = "AutoModelForObjectDetection"
    outputs: ClassVar[Declared] = {
        "objects": ("INT64", ()),
        "label": ("BYTES", ()),
        "score": ("FP32", ()),
        "box": ("FP32", (4,)),
    }
    parameters = DetectionParameters

    def __init__(self, checkpoint: Checkpoint, parameters: DetectionParameters) -> None:
        super().__init__(checkpoint, parameters)
        self._threshold = parameters.threshold

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        images = decode_images("image", inputs["image"])
        output = self.model(**self.encode(images))
        sizes = [(image.height, image.width) for image in images]
        rows = self.processor.post_process_object_detection(output, threshold=self._threshold, target_sizes=sizes)
        return {
            "objects": counts(len(row["scores"]) for row in rows),
            "label": encode_texts(self.model.config.id2label[i] for row in rows for i in row["labels"].tolist()),
            "score": torch.cat([row["scores"] for row in rows]).float(),
            "box": torch.cat([row["boxes"] for row in rows]).float(),
        }


class ZeroShotParameters(TaskParameters):
    """Settings of classification by given labels."""

    labels: str = Field(min_length=1, max_length=65536, description="Labels to choose from, separated by commas")
    template: str = Field(default="This is a photo of {}.", description="Text of a label, with {} for the label")


class ZeroShotImageClassification(ImageTask):
    """The likeliest of the variant's labels for each image, by a model of image-text similarity such as CLIP."""

    auto_class = "AutoModelForZeroShotImageClassification"
    outputs: ClassVar[Declared] = {"label": ("BYTES", ()), "score": ("FP32", ())}
    parameters = ZeroShotParameters

    def __init__(self, checkpoint: Checkpoint, parameters: ZeroShotParameters) -> None:
        super().__init__(checkpoint, parameters)
        self._labels = [label.strip() for label in parameters.labels.split(",") if label.strip()]
        texts = [parameters.template.replace("{}", label) for label in self._labels]
        padding = "max_length" if "siglip" in self.model.config.model_type else True
        self._texts = checkpoint.tokenizer()(texts, padding=padding, return_tensors="pt")

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        images = self.encode(decode_images("image", inputs["image"]))
        logits = self.model(**images, **self._texts.to(self.model.device)).logits_per_image.float()
        siglip = "siglip" in self.model.config.model_type
        score, label = (logits.sigmoid() if siglip else logits.softmax(dim=-1)).max(dim=-1)
        return {"label": encode_texts(self._labels[index] for index in label.tolist()), "score": score}


class ImageEmbeddingParameters(TaskParameters):
    """Settings of image embeddings."""

    normalize: bool = Field(default=True, description="Scale embeddings to length 1")


class ImageEmbedding(ImageTask):
    """An embedding of each image: the projected features of an image-text model, else the pooled state."""

    auto_class = "AutoModel"
    outputs: ClassVar[Declared] = {"embedding": ("FP32", (-1,))}
    parameters = ImageEmbeddingParameters

    def __init__(self, checkpoint: Checkpoint, parameters: ImageEmbeddingParameters) -> None:
        super().__init__(checkpoint, parameters)
        self._normalize = parameters.normalize

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        images = self.encode(decode_images("image", inputs["image"]))
        features = getattr(self.model, "get_image_features", self.model)(**images)
        pooled = getattr(features, "pooler_output", features).float()
        return {"embedding": torch.nn.functional.normalize(pooled, dim=-1) if self._normalize else pooled}
