"""A finished run on disk, so that its report can be made again: samples.jsonl, decisions.jsonl, run.json and load/."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from trimtab.local.supervisor import Fault
from trimtab.timeline import Run, Sample, read_decisions
from trimtab_loadtester.results import SUMMARY_FILE, Results
from trimtab_pipelines.documents import DocumentError, dump_yaml, load_pipeline, write_atomically


@dataclass(frozen=True, slots=True)
class _Facts:
    title: str
    faults: Sequence[Fault]
    ready_seconds: float


_FACTS, _SAMPLE = TypeAdapter(_Facts), TypeAdapter(Sample)


def save(run: Run, folder: Path) -> None:
    """Write a run into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = _Facts(run.title, run.faults, run.ready_seconds)
    write_atomically(folder / "run.json", _FACTS.dump_json(facts, indent=1).decode() + "\n")
    write_atomically(folder / "pipeline.yaml", dump_yaml(run.pipeline))
    lines = [plan.model_dump_json(by_alias=True, exclude_none=True) for plan in run.plans]
    write_atomically(folder / "decisions.jsonl", "".join(f"{line}\n" for line in lines))
    write_atomically(folder / "samples.jsonl", "".join(f"{_SAMPLE.dump_json(s).decode()}\n" for s in run.samples))
    if run.results is not None:
        run.results.save(folder / "load")


def load(folder: Path) -> Run:
    """Read what `save` wrote; raises DocumentError naming what is missing or broken."""
    try:
        facts = _FACTS.validate_json((folder / "run.json").read_bytes())
        samples = [_SAMPLE.validate_json(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        plans = read_decisions(folder / "decisions.jsonl")
        results = Results.load(folder / "load") if (folder / "load" / SUMMARY_FILE).exists() else None
    except OSError as error:
        raise DocumentError(f"{folder} holds no recorded run: {error.filename}: {error.strerror}") from error
    except (ValidationError, ValueError) as error:
        raise DocumentError(f"{folder}: {' '.join(str(error).split())[:300]}") from error
    pipeline = load_pipeline(folder / "pipeline.yaml")
    return Run(facts.title, pipeline, samples, plans, results, facts.faults, facts.ready_seconds)
