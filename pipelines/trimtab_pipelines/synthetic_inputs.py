"""Synthetic inputs: texts and sounds with the lengths of published data sets, and frames of noise.

The annotation `trimtab.dev/payloads` of a pipeline names the distribution of each input, for example
`audio=librispeech, question=squad-question`. The content is noise, for models with random weights; lengths determine
how long a model takes. Load tester and profiler use the same inputs.

Every row of a tensor is padded to the distribution's maximum, so that any rows form a batch; model servers drop the
padding.
"""

import io
import math
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.graph import REQUEST
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.tensors import TensorSpec

PAYLOADS_ANNOTATION = "trimtab.dev/payloads"
DIMENSION_ANNOTATION = "trimtab.dev/default-dimension"
INPUT_ANNOTATIONS = (PAYLOADS_ANNOTATION, DIMENSION_ANNOTATION)
"""Annotations that describe a pipeline's inputs."""
DEFAULT_DIMENSION = 16
DIGITS_AV = "digits-av"
LMM_DIGITS = "lmm-digits"
Array = NDArray[Any]
NO_TOKEN = -1
SAMPLES_PER_SECOND = 16_000
TOKENS_PER_WORD = 1.3  # subwords, by the usual vocabularies of 30 to 60 thousand
MIN_TOKEN_ID, END_TOKEN_ID = 1_000, 10_000  # ordinary tokens of every vocabulary in use
LENGTH_SUFFIX = "_length"
Medium = Literal["text", "image", "audio"]
_FAMILIES: Mapping[str, Medium] = {
    "hf/image-": "image",
    "hf/object-": "image",
    "hf/zero-shot-image-": "image",
    "hf/speech-": "audio",
}
"""Media that families read, by the beginning of their name; others read text."""
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
    """Payloads of a pipeline's annotation: `digits`, `digits-av`, `lmm-digits`, `random`, or distributions.

    Raises ValueError if the kind is unknown.
    """
    kind = pipeline.metadata.annotations.get(PAYLOADS_ANNOTATION, "random")
    if payload_kind(kind) not in {"digits", "random", DIGITS_AV, LMM_DIGITS} and "=" not in kind:
        known = f"digits, {DIGITS_AV}, {LMM_DIGITS}, random, TENSOR=DISTRIBUTION"
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

    kind: Literal["tokens", "sound"]
    """Token ids padded with -1, or samples of sound at 16 kHz padded with zeros."""
    mean: float
    """Tokens, or seconds."""
    spread: float
    """Standard deviation of the length's logarithm."""
    least: float
    most: float

    def lengths(self, count: int, random: np.random.Generator) -> Array:
        """Draw lengths, in tokens or samples."""
        middle = math.log(self.mean) - self.spread**2 / 2
        drawn = random.lognormal(middle, self.spread, count).clip(self.least, self.most)
        return np.asarray(np.rint(drawn * self._unit).astype(np.int64))

    def rows(self, lengths: Array, random: np.random.Generator) -> Array:
        """Fill rows of these lengths with noise, [rows, longest]."""
        shape = (len(lengths), round(self.most * self._unit))
        inside = np.arange(shape[1]) < lengths[:, None]
        if self.kind == "tokens":
            return np.where(inside, random.integers(MIN_TOKEN_ID, END_TOKEN_ID, shape, dtype=np.int64), NO_TOKEN)
        return np.where(inside, 0.1 * random.standard_normal(shape, dtype=np.float32), np.float32(0))

    @property
    def _unit(self) -> int:
        return 1 if self.kind == "tokens" else SAMPLES_PER_SECOND


def _words(mean: float, spread: float, least: int, most: int) -> LengthDistribution:
    return LengthDistribution("tokens", TOKENS_PER_WORD * mean, spread, least, most)


NOISE = "noise"
DISTRIBUTIONS: Mapping[str, LengthDistribution] = {
    # Articles of XSum have 431 words on average (Narayan et al., EMNLP 2018); models read the first 512 tokens.
    "xsum-article": _words(431.07, 0.6, 16, 512),
    # Questions of SQuAD have 10.1 words on average (Reddy et al., TACL 7, 2019).
    "squad-question": _words(10.1, 0.35, 4, 64),
    # newstest2014 has 3,003 French sentences of about 27 words (Bojar et al., WMT 2014).
    "newstest-french": _words(27.0, 0.55, 4, 128),
    # test-clean of LibriSpeech has 5.4 hours in 2,620 utterances (Panayotov et al., ICASSP 2015).
    "librispeech": LengthDistribution("sound", 5.4 * 3600 / 2620, 0.65, 1.3, 15.0),
}
"""Distributions by name. The means are published; spreads and bounds are assumed."""


def parse_distributions(written: str, specs: Sequence[TensorSpec]) -> dict[str, str]:
    """Parse `TENSOR=DISTRIBUTION, …`. Raises ValueError if one of a pair is unknown, or they do not fit."""
    by_name = {spec.name: spec for spec in specs}
    chosen: dict[str, str] = {}
    for part in written.split(","):
        tensor, _, law = (piece.strip() for piece in part.partition("="))
        if tensor not in by_name:
            raise ValueError(
                f"payloads {part.strip()!r}: unknown input {tensor!r}; the inputs are: {', '.join(by_name)}"
            )
        if law not in DISTRIBUTIONS and law != NOISE:
            raise ValueError(
                f"payloads {part.strip()!r}: unknown distribution {law!r}; known: {', '.join([*DISTRIBUTIONS, NOISE])}"
            )
        _require_fit(by_name[tensor], law)
        chosen[tensor] = law
    return chosen


def draw_inputs(
    laws: Mapping[str, str], specs: Sequence[TensorSpec], count: int, seed: Sequence[int]
) -> dict[str, Array]:
    """Draw `count` rows of each tensor with a distribution, and of TENSOR_length, if declared, the samples of sound."""
    rows: dict[str, Array] = {}
    for spec in specs:
        if spec.name not in laws:
            continue
        random = np.random.default_rng([*seed, *spec.name.encode()])
        if laws[spec.name] == NOISE:
            rows[spec.name] = random.integers(0, 256, (count, *spec.shape), dtype=np.uint8)
            continue
        law = DISTRIBUTIONS[laws[spec.name]]
        lengths = law.lengths(count, random)
        rows[spec.name] = law.rows(lengths, random)
        if any(other.name == spec.name + LENGTH_SUFFIX for other in specs):
            rows[spec.name + LENGTH_SUFFIX] = lengths
    return rows


def media(pipeline: InferencePipeline) -> dict[str, Medium]:
    """The medium of each BYTES input of a request, by the families that read it."""
    return {spec.name: _medium(pipeline, spec.name) for spec in pipeline.spec.inputs if spec.datatype == "BYTES"}


def _medium(pipeline: InferencePipeline, name: str) -> Medium:
    source = f"{REQUEST}.inputs.{name}"
    readers = (stage for stage in pipeline.spec.stages if any(read.source == source for read in stage.inputs))
    families = [variant.served_family for stage in readers for variant in stage.variants]
    found = (medium for prefix, medium in _FAMILIES.items() if any(family.startswith(prefix) for family in families))
    return next(found, "text")


def draw_bytes(medium: Medium, shape: Sequence[int], random: np.random.Generator) -> Array:
    """Draw BYTES: texts with the lengths of news sentences, JPEG files, or WAV files with the lengths of utterances."""
    draw = {"text": _draw_text, "image": _draw_image, "audio": _draw_audio}[medium]
    values = np.empty(tuple(shape), dtype=object)
    for position in np.ndindex(values.shape):
        values[position] = draw(random)
    return values


def _draw_text(random: np.random.Generator) -> bytes:
    words = DISTRIBUTIONS["newstest-french"].lengths(1, random)[0] / TOKENS_PER_WORD
    return " ".join(random.choice(WORDS, max(1, round(words)))).encode()


def _draw_image(random: np.random.Generator) -> bytes:
    from PIL import Image  # noqa: PLC0415  (optional)

    file = io.BytesIO()
    blobs = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    blobs.resize(IMAGE_SIZE_PX).save(file, "JPEG")
    return file.getvalue()


def _draw_audio(random: np.random.Generator) -> bytes:
    law, file = DISTRIBUTIONS["librispeech"], io.BytesIO()
    samples = 3_000 * random.standard_normal(law.lengths(1, random)[0])
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLES_PER_SECOND)
        writer.writeframes(samples.clip(-32_768, 32_767).astype("<i2").tobytes())
    return file.getvalue()


def _require_fit(spec: TensorSpec, law: str) -> None:
    if law == NOISE:
        fits, right = spec.datatype == "UINT8" and -1 not in spec.shape, "UINT8 of a fixed shape"
    elif DISTRIBUTIONS[law].kind == "tokens":
        fits, right = (spec.datatype, spec.shape) == ("INT64", (-1,)), "INT64 [-1]"
    else:
        fits, right = (spec.datatype, spec.shape) == ("FP32", (-1,)), "FP32 [-1]"
    if not fits:
        raise ValueError(f"payloads {spec.name}={law}: the input must be {right}, not {spec.datatype} {[*spec.shape]}")
