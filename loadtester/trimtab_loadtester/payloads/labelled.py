"""A user's own samples with their right answers, as payloads: docs/develop/samples.md tells the forms.

`samples.jsonl`, a table `samples.csv`, a folder of images by label, or a class of the user's. What a sample holds is
read when it is first sent.
"""

import csv
import hashlib
import json
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
from trimtab_pipelines.tensors import TensorSpec
from trimtab_protocol import Tensor

JSON_LINES, TABLE = "samples.jsonl", "samples.csv"
MAX_SAMPLES = 1_000_000
MOST_LINE_CHARACTERS = 16 * 2**20
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-3, 1e-6
Truth = Mapping[str, Any]
_TASK = TypeAdapter[str](Name)
Labels = Literal["Required", "Optional"]
"""Whether samples must have right answers."""


class SamplesError(LoadError):
    """Samples that cannot be used; the message names file and line, and says what would be right."""


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """One sample as it is written: values or names of files by input, right answers by output, and where it stands."""

    inputs: Mapping[str, Any]
    truth: Truth
    where: str


class Samples(Protocol):
    """Labelled samples: what a user's own class is like too; it may have `score` and `task(index)` besides."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Mapping[str, NDArray[Any]], Any]:
        """Return the inputs of a sample, one row without its first dimension each, and what is true of it, or None."""
        ...


class LabelledPayloads:
    """Samples in an order drawn by the seed, over and over."""

    def __init__(self, pipeline: InferencePipeline, source: str, seed: int = 0, *, labels: Labels = "Required") -> None:
        """Open samples.

        Args:
            pipeline: whose inputs they hold.
            source: where they are.
            seed: of the order.
            labels: whether samples without right answers will do; then either all have one or none has.

        Raises:
            SamplesError: there are none, or they do not fit.
        """
        self._specs = {spec.name: spec for spec in pipeline.spec.inputs}
        self._optional = {spec.name for spec in pipeline.spec.inputs if spec.optional}
        self._samples, self._score = _opened(pipeline, source, labels)
        if not len(self._samples):
            raise SamplesError(f"{source}: there are no samples")
        self.labelled = labels == "Required" or self._samples[0][1] is not None or self._score is not right_answers
        """Whether there are right answers."""
        self._order = np.random.default_rng(seed).permutation(len(self._samples))

    def __len__(self) -> int:
        """How many different samples there are."""
        return len(self._samples)

    def payload(self, index: int) -> Payload:
        """Return a sample as a request of one row.

        Raises:
            SamplesError: it cannot be read, or does not fit the pipeline's inputs.
        """
        number = int(self._order[index % len(self._order)])
        try:
            inputs, truth = self._samples[number]
            return Payload(tuple(self._tensors(inputs)), truth)
        except InvalidValue as error:
            raise SamplesError(f"sample {number}: {error}") from error

    def task(self, index: int) -> str:
        """The task of a sample, as accuracies by task name it; empty where the samples do not say.

        Raises:
            SamplesError: it is no name.
        """
        own = getattr(self._samples, "task", None)
        number = int(self._order[index % len(self._order)])
        told = "" if own is None else str(own(number))
        try:
            return _TASK.validate_python(told) if told else ""
        except ValidationError:
            raise SamplesError(
                f"sample {number}: task {told!r} is no name; a name has lower-case letters, digits and dashes"
            ) from None

    def tasks(self, count: int) -> tuple[str, ...]:
        """The tasks of the first so many samples, as they come; none where one of these does not say.

        Raises:
            SamplesError: there are too many, or one is no name.
        """
        found = tuple(dict.fromkeys(self.task(index) for index in range(count)))
        if len(found) > MAX_TASKS:
            raise SamplesError(f"the samples are of {len(found)} tasks; accuracies are told of {MAX_TASKS} at most")
        return () if "" in found else found

    def _tensors(self, inputs: Mapping[str, Any]) -> Iterator[Tensor]:
        if unknown := sorted(inputs.keys() - self._specs.keys()):
            raise InvalidValue(f"no input {unknown[0]!r}; there are: {', '.join(self._specs)}")
        for name, spec in self._specs.items():
            if name in inputs:
                yield tensor_of(spec, inputs[name])
            elif name not in self._optional:
                raise InvalidValue(f"input {name!r} is missing")

    def score(self, truth: object, outputs: Outputs) -> Score:
        """Compare an answer with what is true; KeyError where the answer lacks an output."""
        if truth is None and self._score is right_answers:
            raise SamplesError("a sample has no right answer; give one of each, or of none to `trimtab tune`")
        return self._score(truth, outputs)

    def digest(self) -> str:
        """SHA-256 over all samples, whatever form they are written in: names, types, shapes, values, right answers."""
        whole = hashlib.sha256()
        for number in range(len(self._samples)):
            inputs, truth = self._samples[number]
            for name in sorted(inputs):
                tensor = tensor_of(self._specs[name], inputs[name])
                content = tensor.array.tobytes() if tensor.array.dtype != object else b"\0".join(tensor.array.ravel())
                whole.update(f"{name} {tensor.datatype} {[*tensor.shape]}\n".encode() + content)
            whole.update(repr(_plain(truth)).encode() + b"\n")
        return f"sha256:{whole.hexdigest()}"


def _plain(truth: Any) -> Any:
    if isinstance(truth, Mapping):
        return {name: _plain(truth[name]) for name in sorted(truth)}
    return truth.tolist() if isinstance(truth, np.ndarray | np.generic) else truth


class FileSamples:
    """Samples written in files."""

    def __init__(
        self, pipeline: InferencePipeline, written: Sequence[RecordedSample], folder: Path, labels: Labels
    ) -> None:
        self._written, self._folder = written, folder
        needed = labels == "Required" or any(sample.truth for sample in written)
        self._specs = {spec.name: spec for spec in pipeline.spec.inputs}
        outputs = [output.name for output in pipeline.spec.outputs]
        for sample in written:
            _require_known(sample.where, "input", sample.inputs, list(self._specs))
            _require_known(sample.where, "output", sample.truth, outputs)
            if needed and not sample.truth:
                raise SamplesError(f"{sample.where}: no right answer; give one of the outputs: {', '.join(outputs)}")

    def __len__(self) -> int:
        return len(self._written)

    def __getitem__(self, index: int) -> tuple[Mapping[str, Any], Truth | None]:
        sample = self._written[index]
        try:
            read = {name: self._read(self._specs[name], value) for name, value in sample.inputs.items()}
        except (InvalidValue, OSError) as error:
            raise SamplesError(f"{sample.where}: {error}") from error
        return read, sample.truth or None

    def _read(self, spec: TensorSpec, value: Any) -> NDArray[Any]:
        return read_value(spec, value, self._folder)


def _require_known(where: str, kind: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise SamplesError(f"{where}: no {kind} {name!r}; there are: {', '.join(known)}")


def right_answers(truth: Any, outputs: Outputs) -> Score:
    """One answer, right where every output that is known is: whole numbers and texts the same, fractions close.

    A whole number as the truth of a vector of fractions is the place of its greatest: a class by its logits.
    """
    return Score(int(all(_right(expected, outputs[name]) for name, expected in truth.items())), 1)


def _right(expected: Any, given: NDArray[Any]) -> bool:
    """Whether an answer is the right one; one of another kind, a text where numbers come, never is."""
    row = given.reshape(given.shape[1:]) if given.ndim and given.shape[0] == 1 else given
    if row.dtype == object:
        return [*row.ravel()] == [as_bytes(one) for one in np.asarray(expected, dtype=object).ravel()]
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


def _opened(
    pipeline: InferencePipeline, source: str, labels: Labels
) -> tuple[Samples, Callable[[Any, Outputs], Score]]:
    path = Path(source)
    if not path.exists() and ":" in source:
        return _users_class(source)
    if path.is_dir():
        for name in (JSON_LINES, TABLE):
            if (path / name).exists():
                path = path / name
                break
    readers = {".jsonl": _json_lines, ".csv": _table}
    if path.is_dir():
        written = _image_folders(pipeline, path, labels)
    elif path.suffix in readers and path.exists():
        written = readers[path.suffix](pipeline, path)
    else:
        forms = (
            f"a folder with {JSON_LINES}, {TABLE} or a folder of images for each label, such a file, or module:Class"
        )
        raise SamplesError(f"--samples {source}: no samples there; give {forms}")
    found = list(islice(written, MAX_SAMPLES + 1))
    if len(found) > MAX_SAMPLES:
        raise SamplesError(f"{path}: more than {MAX_SAMPLES} samples; give a part of them")
    return FileSamples(pipeline, found, path if path.is_dir() else path.parent, labels), right_answers


def _users_class(source: str) -> tuple[Samples, Callable[[Any, Outputs], Score]]:
    module, _, name = source.partition(":")
    try:
        made = getattr(import_module(module), name)()
    except Exception as error:
        raise SamplesError(f"--samples {source}: {type(error).__name__}: {error}") from error
    own = getattr(made, "score", None)
    return made, right_answers if own is None else lambda truth, outputs: _score_of(own(truth, outputs))


def _score_of(given: Any) -> Score:
    """Read what a user's `score` returned: whether it is right, or how many of how many are."""
    if isinstance(given, tuple):
        correct, total = given
        return Score(int(correct), int(total))
    return Score(int(bool(given)), 1)


def _json_lines(pipeline: InferencePipeline, path: Path) -> Iterator[RecordedSample]:
    outputs = [output.name for output in pipeline.spec.outputs]
    example = f'{{"inputs": {{"{pipeline.spec.inputs[0].name}": …}}, "outputs": {{"{outputs[0]}": …}}}}'
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_CHARACTERS), ""), 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                told = json.loads(line)
                yield RecordedSample(dict(told["inputs"]), dict(told.get("outputs") or {}), where)
            except (ValueError, KeyError, TypeError) as error:
                raise SamplesError(f"{where}: {error!r}; write {example}") from error


def _table(pipeline: InferencePipeline, path: Path) -> Iterator[RecordedSample]:
    inputs = [spec.name for spec in pipeline.spec.inputs]
    outputs = {output.name: source_of(pipeline.spec, output.source).datatype for output in pipeline.spec.outputs}
    answers = {name: datatype for name, datatype in outputs.items() if name not in inputs}
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file)
        heads = rows.fieldnames or ()
        for head in heads:
            if head not in (*inputs, *outputs):
                known = f"inputs {', '.join(inputs)} and outputs {', '.join(outputs)}"
                raise SamplesError(f"{path}: column {head!r} is neither an input nor an output; there are {known}")
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if None in row or None in row.values():
                raise SamplesError(f"{where}: not as many values as the header has: {', '.join(heads)}")
            truth = {name: _told(where, name, answers[name], row[name]) for name in heads if name in answers}
            yield RecordedSample({name: row[name] for name in heads if name in inputs}, truth, where)


def _told(where: str, column: str, datatype: str, text: str) -> bool | int | float | str:
    try:
        return _truth_of(datatype, text)
    except ValueError as error:
        raise SamplesError(f"{where}: column {column!r}: {text!r} is no {datatype}; {error}") from None


def _truth_of(datatype: str, text: str) -> bool | int | float | str:
    """Read a right answer as its output has it: a text as it stands, whatever it looks like.

    Raises:
        ValueError: there is no such value of the datatype.
    """
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
    """Images by label, in a folder each; where labels are optional also images beside one another, without any."""
    names = sorted(each.name for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    inputs, outputs = pipeline.spec.inputs, pipeline.spec.outputs
    if not names and labels == "Optional" and (files := _images(folder)):
        if len(inputs) != 1:
            raise SamplesError(f"{folder}: a folder of images suits a pipeline of one input; write {TABLE}")
        yield from (RecordedSample({inputs[0].name: file.name}, {}, str(file)) for file in files)
        return
    if not names:
        raise SamplesError(f"{folder}: neither {JSON_LINES} nor {TABLE} nor a folder of images for each label")
    if len(inputs) != 1 or len(outputs) != 1:
        raise SamplesError(f"{folder}: folders of images suit a pipeline of one input and one output; write {TABLE}")
    numbered = all(label.isdecimal() for label in names)
    for place, label in enumerate(names):
        truth = int(label) if numbered else place
        for file in _images(folder / label):
            name = str(file.relative_to(folder))
            yield RecordedSample({inputs[0].name: name}, {outputs[0].name: truth}, str(file))


def _images(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.suffix.lower() in IMAGE_SUFFIXES)
