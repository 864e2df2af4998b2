"""Synthetic inputs: texts and audio files with the lengths of published data sets, and images.

The annotation `trimtab.dev/payloads` of a pipeline names the distribution of an input, for example
`audio=librispeech, question=squad-question`. The content is noise or common words; lengths determine how long a model
takes, within the limits that its family and parameters state. Load tester and profiler use the same inputs.

Token ids (INT64 [-1]) are padded to the distribution's maximum, so that any rows form a batch; model servers drop the
padding.
"""

import io
import math
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.families import ARRAYS, HF_FAMILIES, LIMITS, Medium
from trimtab_pipelines.graph import REQUEST
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.tensors import TensorSpec
from trimtab_pipelines.variants import Variant

PAYLOADS_ANNOTATION = "trimtab.dev/payloads"
DIMENSION_ANNOTATION = "trimtab.dev/default-dimension"
INPUT_ANNOTATIONS = (PAYLOADS_ANNOTATION, DIMENSION_ANNOTATION)
"""Annotations that describe a pipeline's inputs."""
DEFAULT_DIMENSION = 16
DIGITS_AV = "digits-av"
LMM_DIGITS = "lmm-digits"
SPOKEN_SUMS = "spoken-sums"
_NAMED = ("digits", DIGITS_AV, LMM_DIGITS, SPOKEN_SUMS, "random")
Array = NDArray[Any]
NO_TOKEN = -1
SAMPLES_PER_SECOND = 16_000
TOKENS_PER_WORD = 1.3  # subwords, by the usual vocabularies of 30 to 60 thousand
MAX_TOKENS_PER_WORD, SPECIAL_TOKENS = 2, 2  # of common words, by small vocabularies
MIN_TOKEN_ID, END_TOKEN_ID = 1_000, 10_000  # ordinary tokens of every vocabulary in use
IMAGE_SIZE_PX = (640, 480)
_WORD_LIST = (
    "a about after all an and are as at back be been but by can could day did do first for from get good had has have "
    "he her him his how if in into is it just know like made make man many may more most my new no not now of off old "
    "on one only or other our out over people place right said same see she should so some such take than that the "
    "their them then there these they thing this time to two under up use very was water way we well were what when "
    "which while who will with word work world would year you your"
)
WORDS = tuple(_WORD_LIST.split())


def payloads_of(pipeline: InferencePipeline) -> str:
    """Payloads of a pipeline's annotation: a name such as `digits`, `random`, or distributions.

    Raises ValueError if the kind is unknown.
    """
    kind = pipeline.metadata.annotations.get(PAYLOADS_ANNOTATION, "random")
    if payload_kind(kind) not in _NAMED and "=" not in kind:
        known = ", ".join((*_NAMED, "TENSOR=DISTRIBUTION"))
        raise ValueError(f"metadata.annotations[{PAYLOADS_ANNOTATION}] {kind!r} is unknown; known payloads: {known}")
    return kind


def payload_kind(payloads: str) -> str:
    """The kind, without options."""
    return payloads.partition(":")[0]


def default_dimension(pipeline: InferencePipeline) -> int:
    """Size of dimensions that may have any size: the pipeline's annotation, else 16.

    Raises ValueError if the annotation is not a positive integer.
    """
    written = pipeline.metadata.annotations.get(DIMENSION_ANNOTATION, str(DEFAULT_DIMENSION))
    if not (written.isascii() and written.isdecimal() and int(written) > 0):
        raise ValueError(f"metadata.annotations[{DIMENSION_ANNOTATION}] {written!r} must be a positive integer")
    return int(written)


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Length distribution of one kind of input: log-normal, truncated at both ends."""

    medium: Medium
    mean: float
    """Tokens of a text, or seconds of audio; as are the bounds."""
    spread: float
    """Standard deviation of the length's logarithm."""
    least: float
    most: float

    def lengths(self, count: int, random: np.random.Generator, limit: float = math.inf) -> Array:
        """Draw lengths, in tokens or seconds."""
        middle = math.log(self.mean) - self.spread**2 / 2
        drawn = random.lognormal(middle, self.spread, count)
        return np.asarray(np.clip(drawn, min(self.least, limit), min(self.most, limit)))


def _words(mean: float, spread: float, least: int, most: int) -> LengthDistribution:
    return LengthDistribution("text", TOKENS_PER_WORD * mean, spread, least, most)


DISTRIBUTIONS: Mapping[str, LengthDistribution] = {
    # Articles of XSum have 431 words on average (Narayan et al., EMNLP 2018); models read the first 512 tokens.
    "xsum-article": _words(431.07, 0.6, 16, 512),
    # Questions of SQuAD have 10.1 words on average (Reddy et al., TACL 7, 2019).
    "squad-question": _words(10.1, 0.35, 4, 64),
    # newstest2014 has 3,003 French sentences of about 27 words (Bojar et al., WMT 2014).
    "newstest-french": _words(27.0, 0.55, 4, 128),
    # test-clean of LibriSpeech has 5.4 hours in 2,620 utterances (Panayotov et al., ICASSP 2015).
    "librispeech": LengthDistribution("audio", 5.4 * 3600 / 2620, 0.65, 1.3, 15.0),
}
"""Distributions by name. The means are published; spreads and bounds are assumed."""


DEFAULT_DISTRIBUTIONS: Mapping[Medium, str] = {"text": "newstest-french", "audio": "librispeech"}


@dataclass(frozen=True, slots=True)
class InputLaw:
    """Medium and lengths of the values of a BYTES input, of arrays in its place, or of a text in token ids."""

    medium: Medium
    lengths: LengthDistribution | None = None
    """None for images."""
    limit: float = math.inf
    """Tokens or seconds of the longest value that all variants accept."""

    def draw(self, spec: TensorSpec, count: int, any_size: int, random: np.random.Generator) -> Array:
        """Draw rows of the input; dimensions of any size have `any_size`."""
        if spec.datatype == "UINT8":
            return random.integers(0, 256, (count, *reversed(IMAGE_SIZE_PX), 3), dtype=np.uint8)
        if spec.datatype == "FP32" and self.lengths is not None:
            seconds = min(self.lengths.mean, self.limit)
            return random.standard_normal((count, int(seconds * SAMPLES_PER_SECOND)), dtype=np.float32) / 10
        if spec.datatype != "BYTES":
            return self._draw_tokens(count, random)
        shape = (count, *(any_size if size == -1 else size for size in spec.shape))
        values = np.empty(shape, dtype=object)
        for position in np.ndindex(shape):
            values[position] = self.draw_value(random)
        return values

    def draw_value(self, random: np.random.Generator) -> bytes:
        """Draw a text, a JPEG file or a WAV file."""
        if self.lengths is None:
            return _draw_image(random)
        draw = _draw_text if self.medium == "text" else _draw_audio
        return draw(float(self.lengths.lengths(1, random, self.limit)[0]), self.limit, random)

    def _draw_tokens(self, count: int, random: np.random.Generator) -> Array:
        assert self.lengths is not None  # noqa: S101 - for mypy
        lengths = np.rint(self.lengths.lengths(count, random))
        shape = (count, round(self.lengths.most))
        tokens = random.integers(MIN_TOKEN_ID, END_TOKEN_ID, shape, dtype=np.int64)
        return np.where(np.arange(shape[1]) < lengths[:, None], tokens, NO_TOKEN)


def input_laws(pipeline: InferencePipeline) -> dict[str, InputLaw]:
    """How BYTES inputs of a request, and those that the annotation names, are drawn; ValueError if it is invalid."""
    kind = payloads_of(pipeline)
    named = _parse_distributions(kind, pipeline.spec.inputs) if "=" in kind and ":" not in kind else {}
    laws = {
        spec: input_law(pipeline, f"{REQUEST}.inputs.{spec.name}", named.get(spec.name))
        for spec in pipeline.spec.inputs
    }
    return {
        spec.name: law
        for spec, law in laws.items()
        if spec.name in named or spec.datatype == "BYTES" or (spec.datatype, spec.shape) == ARRAYS.get(law.medium)
    }


def input_law(pipeline: InferencePipeline, source: str, distribution: str | None = None) -> InputLaw:
    """The law of a tensor by the families that read it: their medium, and the least of their limits."""
    medium: Medium = "text"
    limits = [math.inf]
    for stage in pipeline.spec.stages:
        for read in stage.inputs:
            for variant in stage.variants if read.source == source else ():
                if variant.family in HF_FAMILIES:
                    medium = HF_FAMILIES[variant.family].medium
                    limits.append(_limit(variant, read.name))
    if distribution is None:
        return default_law(medium, min(limits))
    return InputLaw(medium, DISTRIBUTIONS[distribution], min(limits))


def _limit(variant: Variant, name: str) -> float:
    limit = LIMITS.get(name)
    if limit is None or variant.parameters.get("truncate"):
        return math.inf
    return float(variant.parameters.get(limit.parameter, limit.default))


def _parse_distributions(written: str, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """Parse `TENSOR=DISTRIBUTION, …`; ValueError if one of a pair is unknown, or they do not fit."""
    by_name = {spec.name: spec for spec in specs}
    chosen: dict[str, str] = {}
    for part in written.split(","):
        tensor, _, law = (piece.strip() for piece in part.partition("="))
        where = f"payloads {part.strip()!r}"
        if tensor not in by_name:
            raise ValueError(f"{where}: unknown input {tensor!r}; the inputs are: {', '.join(by_name)}")
        if law not in DISTRIBUTIONS:
            raise ValueError(f"{where}: unknown distribution {law!r}; known: {', '.join(DISTRIBUTIONS)}")
        spec, is_text = by_name[tensor], DISTRIBUTIONS[law].medium == "text"
        if spec.datatype != "BYTES" and not (is_text and (spec.datatype, spec.shape) == ("INT64", (-1,))):
            right = "BYTES or INT64 [-1]" if is_text else "BYTES"
            raise ValueError(f"{where}: the input must be {right}, not {spec.datatype} {[*spec.shape]}")
        chosen[tensor] = law
    return chosen


def default_law(medium: Medium, limit: float = math.inf) -> InputLaw:
    """The law of values of a medium, within a limit of tokens or seconds."""
    name = DEFAULT_DISTRIBUTIONS.get(medium)
    return InputLaw(medium, DISTRIBUTIONS[name] if name else None, limit)


TEXT = default_law("text")


def _draw_text(tokens: float, limit: float, random: np.random.Generator) -> bytes:
    words = min(tokens / TOKENS_PER_WORD, (limit - SPECIAL_TOKENS) / MAX_TOKENS_PER_WORD)
    return " ".join(random.choice(WORDS, max(1, int(words)))).encode()


def _draw_image(random: np.random.Generator) -> bytes:
    from PIL import Image  # noqa: PLC0415  (optional)

    file = io.BytesIO()
    blobs = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    blobs.resize(IMAGE_SIZE_PX).save(file, "JPEG")
    return file.getvalue()


def _draw_audio(seconds: float, limit: float, random: np.random.Generator) -> bytes:
    file = io.BytesIO()
    samples = 3_000 * random.standard_normal(int(min(seconds, limit) * SAMPLES_PER_SECOND))
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLES_PER_SECOND)
        writer.writeframes(samples.clip(-32_768, 32_767).astype("<i2").tobytes())
    return file.getvalue()
