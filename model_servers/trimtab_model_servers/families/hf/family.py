"""Families `hf/TASK`: the class of each task. Their tensors are in `trimtab_pipelines.families`."""

from typing import Any

from trimtab_model_servers.families.hf import images, text
from trimtab_model_servers.families.hf.checkpoint import Checkpoint
from trimtab_model_servers.families.hf.question_answering import QuestionAnswering
from trimtab_model_servers.families.hf.speech import SpeechRecognition
from trimtab_model_servers.families.interfaces import Built, read_parameters
from trimtab_model_servers.families.user_module import check_tensors
from trimtab_pipelines.families import HF_FAMILIES
from trimtab_pipelines.model_spec import ModelSpec

TASKS: dict[str, Any] = {
    "text-classification": text.TextClassification,
    "token-classification": text.TokenClassification,
    "question-answering": QuestionAnswering,
    "summarization": text.TextToText,
    "translation": text.Translation,
    "speech-recognition": SpeechRecognition,
    "text-embedding": text.TextEmbedding,
    "image-classification": images.ImageClassification,
    "object-detection": images.ObjectDetection,
    "zero-shot-image-classification": images.ZeroShotImageClassification,
    "image-embedding": images.ImageEmbedding,
}


def build(spec: ModelSpec) -> Built:
    """Check the stage's tensors and the variant's parameters, then load the checkpoint; raises ModelError."""
    declared, task = HF_FAMILIES[spec.family], TASKS[spec.family.partition("/")[2]]
    inputs = declared.read_as({tensor.name: tensor.datatype for tensor in spec.inputs})
    check_tensors(inputs, declared.outputs, spec, declared.optional)
    parameters = read_parameters(task.parameters, spec)
    return Built(task(Checkpoint.open(spec), parameters), "stored")
