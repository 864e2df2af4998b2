"""Payload sources: inputs with known truth if the pipeline names some, else random tensors; no sample is repeated.

A pipeline names its payloads in the annotation `trimtab.dev/payloads`: `digits` for pages of handwritten digits,
`digits-av` for spoken, filmed and typed digits, `lmm-digits` for questions about pages, `TENSOR=DISTRIBUTION, …` for
inputs of drawn lengths (`trimtab_pipelines.synthetic_inputs`), or `random`, the default, for tensors of the pipeline's
input specs. In random tensors a dimension of any size (-1) is the annotation `trimtab.dev/default-dimension`, else 16.
"""

from typing import Protocol, cast

import numpy as np

from trimtab_loadtester.load_spec import LoadError
from trimtab_loadtester.payloads.digits_av import DigitsAvPayloads, JobOptions
from trimtab_loadtester.payloads.interface import Outputs, Payload, Score
from trimtab_loadtester.payloads.lmm_digits import ChatPayloads
from trimtab_pipelines import synthetic_inputs
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.tensors import TensorSpec
from trimtab_protocol import DTYPES, Tensor

RANDOM_BYTES_LENGTH = 16


class PayloadSource(Protocol):
    """An endless supply of payloads, the same for the same seed and index."""

    def payload(self, index: int) -> Payload:
        """Make payload `index` (0, 1, 2 and so on)."""
        ...

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Compare an answer's outputs, by name, with the payload's truth; total 0 where there is none."""
        ...


class RandomPayloads:
    """Random tensors in the shape of a pipeline's inputs: floats uniform in 0…1, integers over 0…127."""

    def __init__(
        self, specs: tuple[TensorSpec, ...], seed: int = 0, default_dimension: int = synthetic_inputs.DEFAULT_DIMENSION
    ) -> None:
        self._specs = specs
        self._seed = seed
        self._default_dimension = default_dimension

    def payload(self, index: int) -> Payload:
        """Draw one row of each input."""
        random = np.random.default_rng([self._seed, index])
        return Payload(tuple(_random_tensor(spec, self._default_dimension, random) for spec in self._specs))

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Nothing is known of random tensors."""
        del truth, outputs
        return Score()


class SyntheticPayloads:
    """Inputs as long as a task's, each drawn by its law; inputs without one are random tensors."""

    def __init__(
        self,
        specs: tuple[TensorSpec, ...],
        written: str,
        seed: int = 0,
        default_dimension: int = synthetic_inputs.DEFAULT_DIMENSION,
    ) -> None:
        self._specs = specs
        self._laws = synthetic_inputs.parse_distributions(written, specs)
        self._seed = seed
        self._default_dimension = default_dimension

    def payload(self, index: int) -> Payload:
        """Draw one row of each input."""
        drawn = synthetic_inputs.draw_inputs(self._laws, self._specs, 1, (self._seed, index))
        random = np.random.default_rng([self._seed, index])
        return Payload(
            tuple(
                Tensor(spec.name, spec.datatype, drawn[spec.name])
                if spec.name in drawn
                else _random_tensor(spec, self._default_dimension, random)
                for spec in self._specs
            )
        )

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Nothing is known of noise."""
        del truth, outputs
        return Score()


class DigitPayloads:
    """Pages that neither training nor the measured accuracies have seen drawn, with the digits on them as truth."""

    def __init__(self, seed: int = 0) -> None:
        from trimtab_training.digits.page_generator import PageSource  # noqa: PLC0415 - slow to import

        self._pages = PageSource(split="held-out", seed=seed)

    def payload(self, index: int) -> Payload:
        """Draw a page: `image`, uint8 [1, 1, 96, 96]."""
        page = self._pages.page(index)
        return Payload((Tensor.of("image", page.pixels[None]),), truth=page)

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Count the digits found in their place and read rightly; KeyError where the answer lacks an output."""
        from trimtab_training.digits.page_generator import Page, score_page  # noqa: PLC0415 - as above

        boxes, digits = outputs["boxes"].reshape(-1, 4), outputs["digit"].reshape(-1)
        result = score_page(cast("Page", truth), boxes, digits)
        return Score(correct=int(result.correct), total=int(result.total))


def require_chats(pipeline: InferencePipeline, load: str, given: str | None) -> None:
    """Raise LoadError where a multimodal load has no chats to send; they are lmm-digits', of as many images as it says.

    `given` is where samples are that the user wants to send.
    """
    named = synthetic_inputs.payloads_of(pipeline)
    if given is not None or synthetic_inputs.payload_kind(named) != synthetic_inputs.LMM_DIGITS:
        instead = f"--samples {given}" if given is not None else f"{pipeline.name}, whose payloads are {named}"
        raise LoadError(
            f"load {load!r} says how many images each chat shows, and sends those of {synthetic_inputs.LMM_DIGITS}; "
            f"send another load to {instead}"
        )


def payload_source(pipeline: InferencePipeline, seed: int = 0) -> PayloadSource:
    """The payloads that the pipeline's annotation names; ValueError names the ones there are."""
    kind = synthetic_inputs.payloads_of(pipeline)
    if kind == "digits":
        return DigitPayloads(seed)
    if synthetic_inputs.payload_kind(kind) == synthetic_inputs.DIGITS_AV:
        return DigitsAvPayloads(seed, JobOptions.parse(kind.partition(":")[2]))
    if synthetic_inputs.payload_kind(kind) == synthetic_inputs.LMM_DIGITS:
        return ChatPayloads(seed, kind.partition(":")[2])
    any_size = synthetic_inputs.default_dimension(pipeline)
    if kind == "random":
        return RandomPayloads(pipeline.spec.inputs, seed, any_size)
    return SyntheticPayloads(pipeline.spec.inputs, kind, seed, any_size)


def _random_tensor(spec: TensorSpec, any_size: int, random: np.random.Generator) -> Tensor:
    shape = (1, *(any_size if size == -1 else size for size in spec.shape))
    if spec.datatype == "BYTES":
        values = np.empty(shape, dtype=object)
        for position in np.ndindex(shape):
            values[position] = random.bytes(RANDOM_BYTES_LENGTH).hex().encode()
        return Tensor(spec.name, "BYTES", values)
    dtype = DTYPES[spec.datatype]
    if dtype.kind == "f":
        return Tensor(spec.name, spec.datatype, random.random(shape, dtype=np.float32).astype(dtype))
    highest = 2 if dtype.kind == "b" else 128
    return Tensor(spec.name, spec.datatype, random.integers(0, highest, size=shape).astype(dtype))
