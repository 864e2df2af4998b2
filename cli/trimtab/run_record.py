"""Record of a run on disk: samples.jsonl, decisions.jsonl, run.json, pipeline.yaml and load/.

It is written during the run, so that it is complete up to the moment at which the run ends, even by `kill -9`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from trimtab.local.supervisor import Fault
from trimtab.run_samples import Run, Sample, read_decisions
from trimtab_loadtester.results import SUMMARY_FILE, Results
from trimtab_pipelines.documents import DocumentError, dump_yaml, load_pipeline, write_atomically
from trimtab_pipelines.jsonl import JsonLinesFile, read_lines, thin_older_half
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.spec import InferencePipeline

FACTS_FILE, SAMPLES_FILE, DECISIONS_FILE, PIPELINE_FILE = (
    "run.json",
    "samples.jsonl",
    "decisions.jsonl",
    "pipeline.yaml",
)
MAX_SAMPLE_BYTES = 16 * 2**20
MAX_PENDING_SAMPLES = 3600
"""Maximum of samples kept in memory while the disk rejects writes: those of an hour."""


@dataclass(frozen=True, slots=True)
class _Facts:
    title: str
    faults: Sequence[Fault]
    ready_seconds: float


_FACTS, _SAMPLE = TypeAdapter(_Facts), TypeAdapter(Sample)


@dataclass(slots=True)
class Recorder:
    """Writer of a run's record; samples that the disk rejects are kept in memory and written later."""

    folder: Path
    """The run folder; `start` removes the record of an earlier run."""
    title: str
    pipeline: InferencePipeline
    disk_error: str = ""
    """Error of the last write, if any."""
    _lines: JsonLinesFile | None = None
    _pending: deque[Sample] = field(default_factory=lambda: deque(maxlen=MAX_PENDING_SAMPLES))
    _facts: _Facts | None = None

    def start(self, plan: PipelinePlan | None) -> None:
        """Start the record; `plan` is the fixed plan of a run without an adapter."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (FACTS_FILE, SAMPLES_FILE, DECISIONS_FILE, f"load/{SUMMARY_FILE}"):
            (self.folder / name).unlink(missing_ok=True)
        write_atomically(self.folder / PIPELINE_FILE, dump_yaml(self.pipeline))
        if plan is not None:
            write_decisions(self.folder, [plan])
        self._write_facts(_Facts(self.title, (), 0.0))
        (self.folder / SAMPLES_FILE).touch()  # a run that ends within its first second has no sample
        self._lines = JsonLinesFile(self.folder / SAMPLES_FILE, MAX_SAMPLE_BYTES, thin_older_half)

    def add(self, sample: Sample, faults: Sequence[Fault], ready_seconds: float) -> None:
        self._pending.append(sample)
        self.write_facts(faults, ready_seconds)

    def write_facts(self, faults: Sequence[Fault], ready_seconds: float) -> None:
        """Write the facts, and all pending samples."""
        facts = _Facts(self.title, tuple(faults), ready_seconds)
        try:
            while self._pending and self._lines is not None:
                self._lines.append(_SAMPLE.dump_json(self._pending[0]).decode())
                self._pending.popleft()
            if facts != self._facts:
                self._write_facts(facts)
        except OSError as error:
            self.disk_error = error.strerror or str(error)
        else:
            self.disk_error = ""

    def samples(self) -> list[Sample]:
        return [*read_lines(self.folder / SAMPLES_FILE, _SAMPLE.validate_json), *self._pending]

    def plans(self) -> list[PipelinePlan]:
        return read_decisions(self.folder / DECISIONS_FILE)

    def _write_facts(self, facts: _Facts) -> None:
        write_atomically(self.folder / FACTS_FILE, _FACTS.dump_json(facts, indent=1).decode() + "\n")
        self._facts = facts


def save(run: Run, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    facts = _Facts(run.title, run.faults, run.ready_seconds)
    write_atomically(folder / FACTS_FILE, _FACTS.dump_json(facts, indent=1).decode() + "\n")
    write_atomically(folder / PIPELINE_FILE, dump_yaml(run.pipeline))
    write_decisions(folder, run.plans)
    write_atomically(folder / SAMPLES_FILE, "".join(f"{_SAMPLE.dump_json(s).decode()}\n" for s in run.samples))
    if run.results is not None:
        run.results.save(folder / "load")


def is_record(folder: Path) -> bool:
    """Whether a folder holds the facts of a run, in a file that is no link."""
    file = folder / FACTS_FILE
    try:
        _FACTS.validate_json(b"" if file.is_symlink() else file.read_bytes())
    except (OSError, ValueError):
        return False
    return True


def load(folder: Path, max_samples: int | None = None, max_plans: int | None = None) -> Run:
    """Read a record, thinned to a maximum of samples and plans; raises DocumentError."""
    try:
        facts = _FACTS.validate_json((folder / FACTS_FILE).read_bytes())
        samples = read_lines(folder / SAMPLES_FILE, _SAMPLE.validate_json, max_samples)
        if not samples and (folder / SAMPLES_FILE).stat().st_size:
            raise DocumentError(f"{folder / SAMPLES_FILE}: no line is a valid sample")
        plans = read_decisions(folder / DECISIONS_FILE, max_plans)
        results = Results.load(folder / "load") if (folder / "load" / SUMMARY_FILE).exists() else None
    except OSError as error:
        raise DocumentError(f"{folder} holds no recorded run: {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise DocumentError(f"{folder}: {' '.join(str(error).split())[:300]}") from error
    pipeline = load_pipeline(folder / PIPELINE_FILE)
    return Run(facts.title, pipeline, samples, plans, results, facts.faults, facts.ready_seconds)


def write_decisions(folder: Path, plans: Sequence[PipelinePlan]) -> None:
    lines = [plan.model_dump_json(by_alias=True, exclude_none=True) for plan in plans]
    write_atomically(folder / DECISIONS_FILE, "".join(f"{line}\n" for line in lines))
