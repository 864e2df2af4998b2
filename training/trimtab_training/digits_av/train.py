"""``python -m trimtab_training.digits_av.train -o DIR [--recordings DATA]``: train the variants and measure them.

Writes ``DIR/weights/VARIANT.safetensors`` and ``DIR/measured.json``. Each variant first learns from synthesised voices.
With recordings, it then learns on from both, once for each speaker from all but that one, on whom it is measured: a
speaker is judged by weights that never heard him, calibrated on the other speakers and on handwriting that is not his.
Shipped is what has not heard the last speaker, nor was calibrated on him, so that there are recordings to try it with;
its metadata say whom it has heard.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from trimtab_model_servers.families.digits_av import SUBSETS, subset_name
from trimtab_model_servers.families.digits_av.calibration import Calibration
from trimtab_model_servers.families.digits_av.variants import HEARD, SOURCE, VARIANTS, Network, build, for_serving, save
from trimtab_pipelines.confidence import ConfidenceSample
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.training_report import MeasuredOn, MeasuredPipeline, MeasuredVariant
from trimtab_training.digits_av.dataset import Items, ItemSource
from trimtab_training.digits_av.evaluate import Scored, Subset, concatenate, measurement_document
from trimtab_training.digits_av.pipeline_writer import write_points
from trimtab_training.digits_av.recorded_digits import Recordings, load_recordings, training_speakers
from trimtab_training.digits_av.train_loops import fit
from trimtab_training.optimizer import Schedule

TRAINING_ITEMS: Final = 5_000
CALIBRATION_ITEMS: Final = 1_000
HELD_OUT_ITEMS: Final = 4_000
TRAINING_SEED, RECORDED_SEED, CALIBRATION_SEED, HELD_OUT_SEED = 21, 22, 23, 24
RECORDED, SYNTHESISED = "recorded", "synthesised"

SCHEDULES: Final = {
    "late": Schedule(steps=650, batch=64, peak_rate=4e-3, seed=1),
    "early": Schedule(steps=2_400, batch=64, peak_rate=2e-3, seed=2),
}
TUNING_STEPS: Final = {"late": 130, "early": 200}
"""Steps on synthesised and recorded sound together, after the first ones."""
TUNING_RATE: Final = 0.5
"""Of the peak rate before."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, eq=False)
class Sounds:
    """What is trained on: items of synthesised voices, and those of recorded ones by speaker."""

    synthesised: Items
    recorded: dict[str, Items]


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A variant, how it is calibrated, and what was measured of it."""

    network: Network
    calibrations: dict[Subset, Calibration]
    seen: dict[str, dict[Subset, ConfidenceSample]]
    what: dict[str, str]
    seconds: float


def draw(recordings: Recordings | None, count: int, tell: Callable[[], None]) -> Sounds:
    """Draw the items to train on: `count` of synthesised voices, as many of all speakers together."""
    synthesised = _counted(ItemSource("train", TRAINING_SEED), count, tell)
    recorded = {}
    if recordings is not None:
        for name in recordings.present:
            source = ItemSource("train", RECORDED_SEED, recordings.of(name))
            recorded[name] = _counted(source, count // len(recordings.present), tell)
    return Sounds(synthesised, recorded)


def train_variant(
    name: str, sounds: Sounds, recordings: Recordings | None, held_out: int, advance: Callable[[float], None]
) -> Trained:
    """Train one variant and measure it.

    Args:
        name: of the variant.
        sounds: what it learns from.
        recordings: of the speakers it is measured on, None to measure it on synthesised voices only.
        held_out: items of each kind that it is measured on.
        advance: hears the loss of each step.
    """
    started, schedule = time.perf_counter(), SCHEDULES[name]
    network = build(VARIANTS[name], seed=schedule.seed)
    fit(network, sounds.synthesised, schedule, advance)
    judges = {
        speaker: _tuned(name, network, sounds.synthesised, _others(sounds.recorded, speaker), advance)
        for speaker in sounds.recorded
    }
    return judge_variant(network, judges, recordings, held_out, time.perf_counter() - started)


def judge_variant(
    network: Network, judges: Mapping[str, Network], recordings: Recordings | None, held_out: int, seconds: float
) -> Trained:
    """Calibrate and measure.

    Args:
        network: that learned from synthesised voices alone; shipped where there are no judges.
        judges: by the speaker that each has not heard.
        recordings: of these speakers.
        held_out: items of each kind.
        seconds: that training took.
    """
    judged = {speaker: Scored.of(judge, _asked(recordings, speaker, held_out)) for speaker, judge in judges.items()}
    by_others = {speaker: Scored.joined(_others(judged, speaker)).calibrations() for speaker in judged}
    if recordings is None:
        asked = ItemSource("held-out", CALIBRATION_SEED, part=(1, 2)).items(0, CALIBRATION_ITEMS)
        calibrations = Scored.of(network, asked).calibrations()
    else:
        shipped = next(speaker for speaker in judges if speaker not in training_speakers(recordings))
        network, calibrations = judges[shipped], by_others[shipped]
    measured = ItemSource("held-out", HELD_OUT_SEED, part=(0, 2)).items(0, held_out)
    seen = {SYNTHESISED: Scored.of(network, measured).seen(calibrations)}
    what = {SYNTHESISED: "voices synthesised by this package, other ones than in training; handwriting held out"}
    if recordings is not None:
        seen[RECORDED] = concatenate(scored.seen(by_others[speaker]) for speaker, scored in judged.items())
        what[RECORDED] = (
            f"real recordings ({recordings.source}) of {', '.join(judged)}, each speaker judged by weights "
            "trained on the others; handwriting held out"
        )
    for subset, calibration in calibrations.items():
        network.calibrate(subset, calibration)
    return Trained(for_serving(network), calibrations, seen, what, seconds)


def _tuned(
    name: str, network: Network, synthesised: Items, recorded: Sequence[Items], advance: Callable[[float], None]
) -> Network:
    """Train a copy on, with synthesised and recorded sound in equal parts."""
    tuned, before = copy.deepcopy(network), SCHEDULES[name]
    schedule = Schedule(TUNING_STEPS[name], before.batch, before.peak_rate * TUNING_RATE, before.seed + 100)
    fit(tuned, _joined([synthesised, *recorded]), schedule, advance)
    return tuned


def _joined(several: Sequence[Items]) -> Items:
    fields = ("audio", "video", "text", "digit")
    return Items(*(np.concatenate([getattr(one, field) for one in several]) for field in fields))


def _others(of_speakers: Mapping[str, Value], speaker: str) -> list[Value]:
    return [one for name, one in of_speakers.items() if name != speaker]


def _asked(recordings: Recordings | None, speaker: str, held_out: int) -> Items:
    if recordings is None:
        raise ValueError("nobody can be judged without recordings")
    speakers = recordings.present
    share, place = held_out // len(speakers), speakers.index(speaker)
    source = ItemSource("held-out", HELD_OUT_SEED, recordings.of(speaker), part=(place, len(speakers)))
    return source.items(place * share, share)


def _counted(source: ItemSource, count: int, tell: Callable[[], None]) -> Items:
    pieces = []
    for start in range(0, count, 100):
        pieces.append(source.items(start, min(100, count - start)))
        tell()
    return _joined(pieces)


def described(name: str, trained: Trained, weights: Path) -> MeasuredVariant:
    """What is written of a variant."""
    return MeasuredVariant(
        name=name,
        on={kind: _of_kind(trained, kind) for kind in trained.seen},
        primary=RECORDED if RECORDED in trained.seen else SYNTHESISED,
        temperatures={subset_name(subset): round(trained.calibrations[subset].temperature, 3) for subset in SUBSETS},
        training={
            "seed": SCHEDULES[name].seed,
            "steps": SCHEDULES[name].steps,
            "tuning_steps": TUNING_STEPS[name] if RECORDED in trained.seen else 0,
            "seconds": round(trained.seconds),
            "parameters": sum(parameter.numel() for parameter in trained.network.parameters()),
            "weights_bytes": weights.stat().st_size,
        },
    )


def _of_kind(trained: Trained, kind: str) -> MeasuredOn:
    return measurement_document(trained.what[kind], trained.seen[kind])


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, write, measure, write."""
    parser = argparse.ArgumentParser(description="Train the digits-av models anew and measure them.")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--recordings", type=Path, metavar="DATA", help="fsdd_dev.npz, or the folder that holds it")
    parser.add_argument("--only", choices=list(VARIANTS), action="append", help="train this variant; repeatable")
    parser.add_argument("--threads", type=int, default=1, help="cores to train on (default 1)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    recordings = None if options.recordings is None else load_recordings(options.recordings)
    try:
        described_by = data_provenance(recordings)
    except ValueError as error:
        parser.error(str(error))
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    path = options.output / "measured.json"
    known = _known(path)
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        drawing = progress.add_task("draw items", total=None, note="")
        sounds = draw(recordings, TRAINING_ITEMS, lambda: progress.update(drawing, advance=1))
        for name in options.only or list(VARIANTS):
            steps = SCHEDULES[name].steps + TUNING_STEPS[name] * len(sounds.recorded)
            task = progress.add_task(name, total=steps, note="")
            trained = train_variant(name, sounds, recordings, HELD_OUT_ITEMS, _advancer(progress, task))
            weights = options.output / "weights" / f"{name}.safetensors"
            save(trained.network, weights, {"seconds": f"{trained.seconds:.0f}", **described_by})
            known[name] = described(name, trained, weights)
            write_json(path, MeasuredPipeline(variants=tuple(known[each] for each in VARIANTS if each in known)))
            console.print(f"{name} trained in {trained.seconds:.0f} s")
    console.print(f"wrote {path}")
    manifest = options.output / "pipeline.yaml"
    if manifest.is_file():
        write_points(manifest, MeasuredPipeline(variants=tuple(known.values())))
    return 0


def data_provenance(recordings: Recordings | None) -> dict[str, str]:
    """What the weights' metadata tell of the recordings that they have learned from."""
    heard = () if recordings is None else training_speakers(recordings)
    return {HEARD: json.dumps(heard), SOURCE: "" if recordings is None else recordings.source}


def _advancer(progress: Progress, task: TaskID) -> Callable[[float], None]:
    return lambda loss: progress.update(task, advance=1, note=f"loss {loss:.2f}")


def _known(path: Path) -> dict[str, MeasuredVariant]:
    if not path.is_file():
        return {}
    document = MeasuredPipeline.model_validate_json(path.read_text())
    return {variant.name: variant for variant in document.variants}


if __name__ == "__main__":
    sys.exit(main())
