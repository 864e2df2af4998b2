"""Labelled samples of a user as payloads; docs/develop/samples.md documents the formats.

The formats are `samples.jsonl`, a table `samples.csv`, a folder of images for each label, and a Python class. The files
of a sample are read when the sample is first sent.
"""

import csv
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from trimtab_loadtester.load_spec import LoadError
from trimtab_loadtester.payloads.interface import Outputs, Payload, Score
from trimtab_loadtester.payloads.sample_values import IMAGE_SUFFIXES, InvalidValue, as_bytes, read_value, tensor_of
from trimtab_pipelines.model_spec import source_of
from trimtab_pipelines.resource import Name
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.tasks import MAX_TASKS
from trimtab_protocol import Tensor

JSON_LINES, TABLE = "samples.jsonl", "samples.csv"
MAX_SAMPLES = 1_000_000
MAX_LINE_CHARACTERS = 16 * 2**20
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-3, 1e-6
Truth = Mapping[str, Any]
_TASK = TypeAdapter[str](Name)
Labels = Literal["Required", "Optional"]
"""Whether samples must have a truth."""


class SamplesError(LoadError):
    """Invalid samples; the message names file and line."""


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """One sample of a file."""

    inputs: Mapping[str, Any]
    """Value or file name of each input."""
    truth: Truth
    """Correct value of each labelled output."""
    location: str
    """File and line, for error messages."""


class Samples(Protocol):
    """Labelled samples; a user's class implements this, with optional `score(truth, outputs)` and `task(index)`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Mapping[str, NDArray[Any]], Any]:
        """Return the inputs of a sample, each a row without its first dimension, and the truth, or None."""
        ...


class LabelledPayloads:
    """Samples in random order, repeated."""

    def __init__(self, pipeline: InferencePipeline, source: str, seed: int = 0, *, labels: Labels = "Required") -> None:
        """Open samples at a path, or of a `module:Class`.

        If labels are `Optional`, either all samples have a truth or none has. Raises SamplesError if there are no
        samples, or they do not match the pipeline.
        """
        self._specs = {spec.name: spec for spec in pipeline.spec.inputs}
        self._optional = {spec.name for spec in pipeline.spec.inputs if spec.optional}
        self._samples, self._score = _open(pipeline, source, labels)
        if not len(self._samples):
            raise SamplesError(f"{source}: there are no samples")
        self.scores_itself = self._score is not right_answers
        """The user's class of samples has its own `score`."""
        self.labelled = labels == "Required" or self._samples[0][1] is not None or self.scores_itself
        """Samples have a truth."""
        self._order = np.random.default_rng(seed).permutation(len(self._samples))

    def __len__(self) -> int:
        return len(self._samples)

    def payload(self, index: int) -> Payload:
        """Return a sample as a request of one row.

        Raises SamplesError if it cannot be read, or does not match the pipeline's inputs.
        """
        number = int(self._order[index % len(self._order)])
        try:
            inputs, truth = self._samples[number]
            return Payload(tuple(self._tensors(inputs)), truth)
        except InvalidValue as error:
            raise SamplesError(f"sample {number}: {error}") from error

    def task(self, index: int) -> str:
        """Task of a sample; empty if the samples have no tasks. Raises SamplesError if it is not a valid name."""
        task_of = getattr(self._samples, "task", None)
        number = int(self._order[index % len(self._order)])
        task = "" if task_of is None else str(task_of(number))
        try:
            return _TASK.validate_python(task) if task else ""
        except ValidationError:
            raise SamplesError(
                f"sample {number}: invalid task {task!r}; a name has lower-case letters, digits and dashes"
            ) from None

    def tasks(self, count: int) -> tuple[str, ...]:
        """Tasks of the first `count` samples, in order; empty if one of these has no task.

        Raises SamplesError if there are too many, or one is not a valid name.
        """
        tasks = tuple(dict.fromkeys(self.task(index) for index in range(count)))
        if len(tasks) > MAX_TASKS:
            raise SamplesError(f"the samples are of {len(tasks)} tasks; accuracies are reported of at most {MAX_TASKS}")
        return () if "" in tasks else tasks

    def _tensors(self, inputs: Mapping[str, Any]) -> Iterator[Tensor]:
        if unknown := sorted(inputs.keys() - self._specs.keys()):
            raise InvalidValue(f"no input {unknown[0]!r}; there are: {', '.join(self._specs)}")
        for name, spec in self._specs.items():
            if name in inputs:
                yield tensor_of(spec, inputs[name])
            elif name not in self._optional:
                raise InvalidValue(f"input {name!r} is missing")

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Compare outputs with the truth of a sample; raises KeyError if an output is missing."""
        if truth is None and not self.scores_itself:
            raise SamplesError("a sample has no right answer; give one for each sample, or for none to `trimtab tune`")
        return self._score(truth, outputs)

    def digest(self) -> str:
        """SHA-256 of names, types, shapes, values and truth of all samples, independent of their format."""
        digest = hashlib.sha256()
        for number in range(len(self._samples)):
            inputs, truth = self._samples[number]
            for name in sorted(inputs):
                tensor = tensor_of(self._specs[name], inputs[name])
                content = tensor.array.tobytes() if tensor.array.dtype != object else b"\0".join(tensor.array.ravel())
                digest.update(f"{name} {tensor.datatype} {[*tensor.shape]}\n".encode() + content)
            digest.update(repr(_plain(truth)).encode() + b"\n")
        return f"sha256:{digest.hexdigest()}"


def _plain(truth: Any) -> Any:
    if isinstance(truth, Mapping):
        return {name: _plain(truth[name]) for name in sorted(truth)}
    return truth.tolist() if isinstance(truth, np.ndarray | np.generic) else truth


class FileSamples:
    """Samples in files."""

    def __init__(
        self, pipeline: InferencePipeline, samples: Sequence[RecordedSample], folder: Path, labels: Labels
    ) -> None:
        self._samples, self._folder = samples, folder
        truth_required = labels == "Required" or any(sample.truth for sample in samples)
        self._specs = {spec.name: spec for spec in pipeline.spec.inputs}
        outputs = [output.name for output in pipeline.spec.outputs]
        for sample in samples:
            _require_names(sample.location, "input", sample.inputs, list(self._specs))
            _require_names(sample.location, "output", sample.truth, outputs)
            if truth_required and not sample.truth:
                raise SamplesError(f"{sample.location}: no right answer; give one of the outputs: {', '.join(outputs)}")

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Mapping[str, Any], Truth | None]:
        sample = self._samples[index]
        try:
            inputs = {name: read_value(self._specs[name], value, self._folder) for name, value in sample.inputs.items()}
        except (InvalidValue, OSError) as error:
            raise SamplesError(f"{sample.location}: {error}") from error
        return inputs, sample.truth or None


def _require_names(location: str, kind: str, values: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in values:
        if name not in names:
            raise SamplesError(f"{location}: no {kind} {name!r}; there are: {', '.join(names)}")


def agreement(reference: Outputs, outputs: Outputs) -> Score:
    """Rows on which two variants give the same result: equal integers, booleans and texts.

    Without such an output, the results are the largest elements of vectors of floats, and floats that are close. If the
    numbers of rows differ, no row agrees.
    """
    exact = [name for name, array in reference.items() if array.dtype.kind not in "fc"]
    pairs = [(reference[name], outputs[name]) for name in exact or reference]
    sizes = {max(len(array), 1) for pair in pairs for array in pair}
    if any(one.shape != other.shape for one, other in pairs) or len(sizes) > 1:
        return Score(0, max(sizes))
    rows = np.all([_same_rows(one, other) for one, other in pairs], axis=0)
    return Score(int(rows.sum()), rows.size, rows) if rows.size else Score(1, 1, rows)


def _same_rows(one: NDArray[Any], other: NDArray[Any]) -> NDArray[np.bool_]:
    one, other = (array.reshape(len(array), math.prod(array.shape[1:])) for array in (one, other))
    if one.dtype.kind == "f" and one.shape[1] > 1:
        return np.asarray(one.argmax(axis=1) == other.argmax(axis=1))
    if one.dtype.kind == "f":
        return np.asarray(np.isclose(one[:, 0], other[:, 0], rtol=RELATIVE_TOLERANCE, atol=ABSOLUTE_TOLERANCE))
    return np.array([bool(np.all(row)) for row in np.equal(one, other)])


def right_answers(truth: Any, outputs: Outputs) -> Score:
    """Score one sample: integers and texts must be equal to the truth, floats close to it, in each labelled output.

    An integer truth of a vector of floats is compared with the argmax: a class and its logits.
    """
    return Score(int(all(_is_correct(expected, outputs[name]) for name, expected in truth.items())), 1)


def _is_correct(expected: Any, output: NDArray[Any]) -> bool:
    """Whether an output is correct; a value of another kind than the truth, such as text for a number, is not."""
    row = output.reshape(output.shape[1:]) if output.ndim and output.shape[0] == 1 else output
    if row.dtype == object:
        return [*row.ravel()] == [as_bytes(element) for element in np.asarray(expected, dtype=object).ravel()]
    wanted = np.asarray(expected)
    if wanted.dtype.kind not in "biuf":
        return False
    if wanted.ndim == 0 and wanted.dtype.kind in "iu" and row.dtype.kind == "f" and row.size > 1:
        return int(np.argmax(row)) == int(wanted)
    if wanted.size != row.size:
        return False
    flat = np.ravel(row)
    if wanted.dtype.kind == "f" or flat.dtype.kind == "f":
        return bool(np.allclose(flat, np.ravel(wanted), rtol=RELATIVE_TOLERANCE, atol=ABSOLUTE_TOLERANCE))
    return bool(np.array_equal(flat, np.ravel(wanted)))


def _open(pipeline: InferencePipeline, source: str, labels: Labels) -> tuple[Samples, Callable[[Any, Outputs], Score]]:
    path = Path(source)
    if not path.exists() and ":" in source:
        return _import_class(source)
    if path.is_dir():
        for name in (JSON_LINES, TABLE):
            if (path / name).exists():
                path = path / name
                break
    readers = {".jsonl": _json_lines, ".csv": _table}
    if path.is_dir():
        samples = _image_folders(pipeline, path, labels)
    elif path.suffix in readers and path.exists():
        samples = readers[path.suffix](pipeline, path)
    else:
        forms = (
            f"a folder with {JSON_LINES}, {TABLE} or a folder of images for each label, such a file, or module:Class"
        )
        raise SamplesError(f"--samples {source}: no samples there; give {forms}")
    recorded = list(islice(samples, MAX_SAMPLES + 1))
    if len(recorded) > MAX_SAMPLES:
        raise SamplesError(f"{path}: more than {MAX_SAMPLES} samples; give fewer")
    return FileSamples(pipeline, recorded, path if path.is_dir() else path.parent, labels), right_answers


def _import_class(source: str) -> tuple[Samples, Callable[[Any, Outputs], Score]]:
    module, _, name = source.partition(":")
    try:
        samples = getattr(import_module(module), name)()
    except Exception as error:
        raise SamplesError(f"--samples {source}: {type(error).__name__}: {error}") from error
    score = getattr(samples, "score", None)
    return samples, right_answers if score is None else lambda truth, outputs: _score_of(score(truth, outputs))


def _score_of(value: Any) -> Score:
    """Convert the return value of a user's `score`: a bool, or a tuple (correct, total), or (correct, total, rows).

    `rows` has 1 for a correct row, 0 for a wrong one and -1 for one without truth.
    """
    if isinstance(value, tuple):
        correct, total, *by_row = value
        rows = np.asarray(by_row[0]) if by_row else None
        return Score(int(correct), int(total)) if rows is None else Score(int(correct), int(total), rows > 0, rows >= 0)
    return Score(int(bool(value)), 1)


def _json_lines(pipeline: InferencePipeline, path: Path) -> Iterator[RecordedSample]:
    outputs = [output.name for output in pipeline.spec.outputs]
    example = f'{{"inputs": {{"{pipeline.spec.inputs[0].name}": …}}, "outputs": {{"{outputs[0]}": …}}}}'
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_CHARACTERS), ""), 1):
            if not line.strip():
                continue
            location = f"{path}, line {number}"
            try:
                document = json.loads(line)
                yield RecordedSample(dict(document["inputs"]), dict(document.get("outputs") or {}), location)
            except (ValueError, KeyError, TypeError) as error:
                raise SamplesError(f"{location}: {error!r}; write {example}") from error


def _table(pipeline: InferencePipeline, path: Path) -> Iterator[RecordedSample]:
    inputs = [spec.name for spec in pipeline.spec.inputs]
    outputs = {output.name: source_of(pipeline.spec, output.source).datatype for output in pipeline.spec.outputs}
    labels = {name: datatype for name, datatype in outputs.items() if name not in inputs}
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        heads = rows.fieldnames or ()
        for head in heads:
            if head not in (*inputs, *outputs):
                names = f"inputs {', '.join(inputs)} and outputs {', '.join(outputs)}"
                raise SamplesError(f"{path}: column {head!r} is neither an input nor an output; there are {names}")
        for row in rows:
            location = f"{path}, line {rows.line_num}"
            if None in row or None in row.values():
                raise SamplesError(f"{location}: expected one value for each column of the header: {', '.join(heads)}")
            truth = {name: _parse_label(location, name, labels[name], row[name]) for name in heads if name in labels}
            yield RecordedSample({name: row[name] for name in heads if name in inputs}, truth, location)


def _parse_label(location: str, column: str, datatype: str, text: str) -> bool | int | float | str:
    try:
        return _truth_of(datatype, text)
    except ValueError as error:
        raise SamplesError(f"{location}: column {column!r}: {text!r} is not {datatype}; {error}") from None


def _truth_of(datatype: str, text: str) -> bool | int | float | str:
    """Parse a label as its output's datatype. Raises ValueError if the text is not a value of the datatype."""
    if datatype == "BYTES":
        return text
    if datatype == "BOOL":
        truths = {"true": True, "1": True, "false": False, "0": False}
        if text.lower() not in truths:
            raise ValueError("write true or false")
        return truths[text.lower()]
    with suppress(ValueError):
        return int(text)
    try:
        return float(text)
    except ValueError:
        raise ValueError("write a number") from None


def _image_folders(pipeline: InferencePipeline, folder: Path, labels: Labels) -> Iterator[RecordedSample]:
    """Images in one folder for each label; if labels are optional, also unlabelled images in one folder."""
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    inputs, outputs = pipeline.spec.inputs, pipeline.spec.outputs
    if not names and labels == "Optional" and (files := _images(folder)):
        if len(inputs) != 1:
            raise SamplesError(f"{folder}: a folder of images needs a pipeline with one input; write {TABLE}")
        yield from (RecordedSample({inputs[0].name: file.name}, {}, str(file)) for file in files)
        return
    if not names:
        raise SamplesError(f"{folder}: neither {JSON_LINES} nor {TABLE} nor a folder of images for each label")
    if len(inputs) != 1 or len(outputs) != 1:
        raise SamplesError(f"{folder}: folders of images need a pipeline with one input and one output; write {TABLE}")
    numbered = all(label.isdecimal() for label in names)
    for index, label in enumerate(names):
        truth = int(label) if numbered else index
        for file in _images(folder / label):
            name = str(file.relative_to(folder))
            yield RecordedSample({inputs[0].name: name}, {outputs[0].name: truth}, str(file))


def _images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
