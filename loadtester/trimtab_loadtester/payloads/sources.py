"""Payload sources: labelled inputs if the pipeline names them, else random tensors.

A pipeline names its payloads in the annotation `trimtab.dev/payloads`: `digits` for pages of handwritten digits,
`digits-av` for spoken, filmed and typed digits, `lmm-digits` for questions about pages, `spoken-sums` for sums in WAV
files, `TENSOR=DISTRIBUTION, …` for inputs with random lengths (`trimtab_pipelines.synthetic_inputs`), or `random`, the
default, for random tensors. In a random tensor a dimension of any size (-1) has the size of the annotation
`trimtab.dev/default-dimension`, else 16.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

import numpy as np

from trimtab_loadtester.load_spec import LoadError
from trimtab_loadtester.payloads.digits_av import DigitsAvPayloads, JobOptions
from trimtab_loadtester.payloads.interface import Outputs, Payload, PayloadSource, Score
from trimtab_loadtester.payloads.lmm_digits import ChatPayloads
from trimtab_pipelines import synthetic_inputs
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.synthetic_inputs import TEXT
from trimtab_pipelines.tensors import TensorSpec
from trimtab_protocol import DTYPES, Tensor
from trimtab_protocol.tensors import bytes_array


class SyntheticPayloads:
    """Inputs drawn from distributions; an input without a distribution is a random tensor.

    Random floats are uniform in 0…1, random integers over 0…127.
    """

    def __init__(
        self,
        specs: tuple[TensorSpec, ...],
        seed: int = 0,
        default_dimension: int = synthetic_inputs.DEFAULT_DIMENSION,
        laws: Mapping[str, synthetic_inputs.InputLaw] = MappingProxyType({}),
    ) -> None:
        self._specs, self._seed, self._default_dimension, self._laws = specs, seed, default_dimension, laws

    def payload(self, index: int) -> Payload:
        random = np.random.default_rng([self._seed, index])
        tensors = (
            Tensor(spec.name, spec.datatype, law.draw(spec, 1, self._default_dimension, random))
            if (law := self._laws.get(spec.name, TEXT if spec.datatype == "BYTES" else None))
            else _random_tensor(spec, self._default_dimension, random)
            for spec in self._specs
        )
        return Payload(tuple(tensors))

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Return an empty score: synthetic inputs have no truth."""
        del truth, outputs
        return Score()


class DigitPayloads:
    """Held-out pages, which neither training nor the accuracy measurements use, with their digits as truth."""

    def __init__(self, seed: int = 0) -> None:
        from trimtab_training.digits.page_generator import PageSource  # noqa: PLC0415 - slow to import

        self._pages = PageSource(split="held-out", seed=seed)

    def payload(self, index: int) -> Payload:
        """Draw a page: `image`, uint8 [1, 1, 96, 96]."""
        page = self._pages.page(index)
        return Payload((Tensor.of("image", page.pixels[None]),), truth=page)

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Count the digits with correct box and class; raises KeyError if an output is missing."""
        from trimtab_training.digits.page_generator import Page, score_page  # noqa: PLC0415 - as above

        boxes, digits = outputs["boxes"].reshape(-1, 4), outputs["digit"].reshape(-1)
        result = score_page(cast("Page", truth), boxes, digits)
        return Score(correct=int(result.correct), total=int(result.total))


class SpokenSumPayloads:
    """Held-out spoken sums as WAV files, which training and accuracy measurements do not use, with their results."""

    def __init__(self, seed: int = 0) -> None:
        from trimtab_training.spoken_sums.dataset import SumSource  # noqa: PLC0415 - slow to import

        self._sums = SumSource("held-out", seed)

    def payload(self, index: int) -> Payload:
        """Draw a sum: `audio`, BYTES [1]."""
        spoken = self._sums.spoken(index)
        return Payload((Tensor("audio", "BYTES", bytes_array([spoken.wav()], (1,))),), truth=spoken.result)

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Compare the label; raises KeyError if it is missing."""
        return Score(correct=int(outputs["label"].item() == str(truth).encode()), total=1)


def require_chats(pipeline: InferencePipeline, load: str, samples: str | None) -> None:
    """Raise LoadError if a multimodal load cannot be sent: it needs the payloads lmm-digits and no `--samples`."""
    payloads = synthetic_inputs.payloads_of(pipeline)
    if samples is not None or synthetic_inputs.payload_kind(payloads) != synthetic_inputs.LMM_DIGITS:
        instead = f"--samples {samples}" if samples is not None else f"{pipeline.name}, whose payloads are {payloads}"
        raise LoadError(
            f"load {load!r} sets the images of each chat and needs the payloads {synthetic_inputs.LMM_DIGITS}; "
            f"use another load for {instead}"
        )


def payload_source(pipeline: InferencePipeline, seed: int = 0) -> PayloadSource:
    """Payloads that the pipeline's annotation names; raises ValueError if they are unknown."""
    kind = synthetic_inputs.payloads_of(pipeline)
    if kind == "digits":
        return DigitPayloads(seed)
    if synthetic_inputs.payload_kind(kind) == synthetic_inputs.DIGITS_AV:
        return DigitsAvPayloads(seed, JobOptions.parse(kind.partition(":")[2]))
    if synthetic_inputs.payload_kind(kind) == synthetic_inputs.LMM_DIGITS:
        return ChatPayloads(seed, kind.partition(":")[2])
    if kind == synthetic_inputs.SPOKEN_SUMS:
        return SpokenSumPayloads(seed)
    any_size, laws = synthetic_inputs.default_dimension(pipeline), synthetic_inputs.input_laws(pipeline)
    return SyntheticPayloads(pipeline.spec.inputs, seed, any_size, laws)


def _random_tensor(spec: TensorSpec, any_size: int, random: np.random.Generator) -> Tensor:
    shape = (1, *(any_size if size == -1 else size for size in spec.shape))
    dtype = DTYPES[spec.datatype]
    if dtype.kind == "f":
        return Tensor(spec.name, spec.datatype, random.random(shape, dtype=np.float32).astype(dtype))
    highest = 2 if dtype.kind == "b" else 128
    return Tensor(spec.name, spec.datatype, random.integers(0, highest, size=shape).astype(dtype))
