"""The tasks in force: those of the weights and of the pipeline for good, those of a folder as they come and go.

What is in force is replaced as a whole, so that a batch sees one state of it. A file that does not fit is left out and
told, whatever it holds; nothing else changes by it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer.checkpoints import Checkpoint
from trimtab_model_servers.transformer.prompt_selection import fallback_order, prompt_counts, prompt_variant
from trimtab_model_servers.transformer.task_files import TaskFile, load_task
from trimtab_model_servers.transformer.tasks import Head, TaskBank
from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.tasks import MAX_TASK_NUMBER, MAX_TASKS, parse_file_name

NONE = -1
Heads = Mapping[str, Head]
"""Of one task, by way to run."""
_Version = tuple[str, int, int]
"""Of a file: where it is, when it was written, and which it is."""


@dataclass(frozen=True, slots=True, eq=False)
class ActiveTasks:
    """The tasks at one moment.

    Attributes:
        names: by number; empty where a number has no task.
        places: int64 [numbers], where each number's heads stand in the banks; NONE where it has no task.
        banks: the heads of all tasks, by what a point does (`ways.way`); of each task those that do best there.
        refused: why files are left out, by their names.
        judged: how accurate points are on tasks that joined, as their cards tell; by task and point.
    """

    names: tuple[str, ...]
    bank_indices: Tensor
    banks: Mapping[str, TaskBank]
    refused: Mapping[str, str]
    accuracies: Mapping[str, Mapping[str, Accuracy]]

    def bank_indices_of(self, tasks: Tensor) -> tuple[Tensor, Tensor]:
        """Where rows' heads stand, and for which rows there are any: tasks int64 [B] to [B] and bool [B]."""
        known = (tasks >= 0) & (tasks < len(self.bank_indices))
        places = self.bank_indices[tasks.where(known, 0)]
        known &= places != NONE
        return places.where(known, 0), known

    def to(self, device: torch.device) -> "ActiveTasks":
        """The same tasks, with their heads on a device."""
        banks = {way: bank.to(device) for way, bank in self.banks.items()}
        return replace(self, places=self.bank_indices.to(device), banks=banks)

    def by_bank_index(self, of_task: Mapping[str, float], otherwise: float) -> Tensor:
        """A number for each place in the banks, by the names of the tasks there: [tasks]."""
        numbers = (self.bank_indices != NONE).nonzero().view(-1).tolist()
        return torch.tensor([of_task.get(self.names[number], otherwise) for number in numbers])


class TaskRegistry:
    """Reads tasks.

    Args:
        stored: the transformer with the tasks of its weights.
        points: those that it runs.
        mark: the fingerprint that files of tasks must have.
        given: the pipeline's own tasks, names and files, None for one that is gone; one that does not fit is an error.
        folder: of those that come and go; None for none.
        most_classes: that an answer has room for; None for any number.

    Raises:
        ModelError: naming the pipeline's task that does not fit.
    """

    def __init__(
        self,
        stored: Checkpoint,
        points: Sequence[OperatingPoint],
        *,
        fingerprint: str = "",
        pipeline_tasks: Sequence[tuple[str, Path | None]] = (),
        folder: Path | None = None,
        max_classes: int | None = None,
    ) -> None:
        self._shape, self._trained, self._most_classes = stored.transformer.shape, tuple(stored.heads), max_classes
        self._tried, self._prompts = (
            {prompt_variant(point): fallback_order(point) for point in points},
            prompt_counts(points),
        )
        self.fingerprint, self._folder = fingerprint, folder
        self._read: dict[_Version, TaskFile] = {}
        self._seen: list[_Version] = []
        self._settled: dict[int, tuple[str, Heads]] = {
            number: (name, {each: by_task[name] for each, by_task in stored.heads.items() if each in self._prompts})
            for number, name in enumerate(stored.tasks)
        }
        self._judged: dict[str, Mapping[str, Accuracy]] = {}
        self._numbers = len(stored.tasks) + len(pipeline_tasks)
        for number, (name, path) in enumerate(pipeline_tasks, len(stored.tasks)):
            if path is None:
                continue
            try:
                self._judged[name] = self._join(self._settled, number, name, path)
            except ModelError as error:
                raise ModelError(f"task {name!r} ({path}): {error}") from error

    @property
    def prompt_variants(self) -> Collection[str]:
        """Those that some task has which is here for good."""
        return dict.fromkeys((*self._trained, *(each for _, heads in self._settled.values() for each in heads)))

    def changed(self) -> bool:
        """Whether the folder holds other files than when it was read last."""
        return [_version(path) for path in self._files()] != self._seen

    def snapshot(self) -> ActiveTasks:
        """All that is in force now, the folder read anew."""
        tasks, judged, refused = dict(self._settled), dict(self._judged), {}
        self._read, before = {}, self._read
        files = self._files()
        self._seen = [_version(path) for path in files]
        for path in files:
            number, name = parse_file_name(path.name) or (NONE, "")
            try:
                judged[name] = self._join(tasks, number, name, path, before)
            except ModelError as error:
                refused[path.stem] = str(error)
        numbers = sorted(tasks)
        places = torch.full((max(self._numbers, numbers[-1] + 1),), NONE)
        places[torch.tensor(numbers)] = torch.arange(len(numbers))
        banks = {
            each: TaskBank([_first(tasks[number][1], names) for number in numbers])
            for each, names in self._tried.items()
        }
        names = tuple(tasks[number][0] if number in tasks else "" for number in range(len(places)))
        return ActiveTasks(names, places, banks, refused, judged)

    def _files(self) -> list[Path]:
        if self._folder is None or not self._folder.is_dir():
            return []
        found = [(parse_file_name(path.name), path) for path in self._folder.iterdir()]
        return [path for named, path in sorted(found, key=lambda one: one[0] or (0, "")) if named]

    def _join(
        self,
        tasks: dict[int, tuple[str, Heads]],
        number: int,
        name: str,
        path: Path,
        before: Mapping[_Version, TaskFile] = MappingProxyType({}),
    ) -> Mapping[str, Accuracy]:
        """Add a task; returns how accurate points are on it."""
        if name in {known for known, _ in tasks.values()}:
            raise ModelError(f"there is a task {name!r} already")
        if number in tasks:
            raise ModelError(f"number {number} is task {tasks[number][0]!r}'s already")
        if number > MAX_TASK_NUMBER or len(tasks) == MAX_TASKS:
            raise ModelError(f"there may be {MAX_TASKS} tasks, with numbers up to {MAX_TASK_NUMBER}")
        card, heads = self._file(path, before)
        classes = len(next(iter(heads.values())).bias)
        if self._most_classes is not None and classes > self._most_classes:
            raise ModelError(f"it has {classes} classes; the stage declares room for {self._most_classes}")
        tasks[number] = name, heads
        return card.accuracy_by_point

    def _file(self, path: Path, before: Mapping[_Version, TaskFile]) -> TaskFile:
        """A file, read once as long as it stays the same."""
        version = _version(path)
        found = before[version] if version in before else load_task(path, self._shape, self.fingerprint, self._prompts)
        self._read[version] = found
        return found


def _first(heads: Heads, ways: Iterable[str]) -> Head:
    return next(heads[each] for each in ways if each in heads)


def _version(path: Path) -> _Version:
    try:
        status = path.stat()
    except OSError:
        return str(path), 0, 0
    return str(path), status.st_mtime_ns, status.st_ino
