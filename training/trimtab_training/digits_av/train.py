"""Training of the digits-av pipeline: `python -m trimtab_training.digits_av.train -o DIR [--recordings DATA]`.

Writes `DIR/weights/VARIANT.safetensors`, `DIR/measured.json` and the accuracies in `DIR/pipeline.yaml`. Each variant is
trained on synthesised voices first. With recordings, it is then tuned on both, once per speaker without that speaker,
and measured on that speaker (cross-validation), calibrated on the other speakers and on other handwriting. The shipped
weights are those of the last speaker's fold, whose recordings remain unseen; their metadata lists the speakers used in
training.
"""

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
import torch.nn.functional as fn
from torch import Tensor

from trimtab_model_servers.families.digits_av import MODALITIES, SUBSETS, subset_name
from trimtab_model_servers.families.digits_av.base import Calibration, select_modalities, strict_pairs
from trimtab_model_servers.families.digits_av.family import (
    RECORDINGS_KEY,
    SPEAKERS_KEY,
    VARIANTS,
    Network,
    build_network,
    prepare_for_serving,
    save,
)
from trimtab_model_servers.families.digits_av.late_fusion import LateNetwork
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.escalation_thresholds import ConfidenceSample
from trimtab_training.digits_av.dataset import Items, ItemSource, Recordings, load_recordings, training_speakers
from trimtab_training.digits_av.evaluate import (
    Inputs,
    ScoredItems,
    Subset,
    concatenate_samples,
    measurement_document,
    to_tensors,
)
from trimtab_training.digits_av.report import MeasuredPipeline, MeasuredVariant, write_points
from trimtab_training.trainer import Advance, Schedule, argument_parser, loss_bar, train_network, training_progress

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
"""Further steps on synthesised and recorded voices together."""
TUNING_RATE: Final = 0.5
"""Peak learning rate of tuning, as a share of the first one."""
RANKING_WEIGHT: Final = 0.5
_PAIRS: Final = strict_pairs()

Value = TypeVar("Value")


def fit(network: Network, items: Items, schedule: Schedule, advance: Advance) -> None:
    """Train a network on items and leave it in evaluation mode; every modality subset is trained explicitly.

    Early fusion runs its trunk once per subset: a step trains one subset and a larger one. Late fusion encodes each
    modality once and fuses all seven subsets in every step. Both add a ranking loss (SimMLM, 2025): a subset's loss may
    not exceed that of a smaller one.

    Modalities of items with the same digit are exchanged at random, so that they share nothing but the digit.
    """
    random = np.random.default_rng(schedule.seed)
    inputs, _ = to_tensors(items)
    rows_of_digit = [np.flatnonzero(items.digit == digit) for digit in range(10)]

    def loss() -> Tensor:
        digits = random.integers(10, size=schedule.batch)
        rows = {name: torch.from_numpy(_draw_rows(rows_of_digit, digits, random)) for name in MODALITIES}
        batch = {name: inputs[name][indices] for name, indices in rows.items()}
        return _loss(network, batch, torch.from_numpy(digits), random)

    train_network(network, loss, schedule, warm_up_share=0.15, max_gradient_norm=2.0, advance=advance)


def _draw_rows(rows_of_digit: Sequence[np.ndarray], digits: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return np.array([rows_of_digit[digit][random.integers(rows_of_digit[digit].size)] for digit in digits])


def _loss(network: Network, batch: Inputs, digits: Tensor, random: np.random.Generator) -> Tensor:
    if isinstance(network, LateNetwork):
        features = {name: network.encode(name, batch[name]) for name in MODALITIES}
        logits = {subset: network.fuse(select_modalities(features, subset)) for subset in SUBSETS}
        losses = {subset: fn.cross_entropy(scores, digits) for subset, scores in logits.items()}
        ranked = [fn.relu(losses[more] - losses[fewer].detach()) for fewer, more in _PAIRS]
        return torch.stack(list(losses.values())).mean() + RANKING_WEIGHT * torch.stack(ranked).mean()
    fewer_loss, more_loss = (
        fn.cross_entropy(network.logits(select_modalities(batch, subset)), digits)
        for subset in _PAIRS[random.integers(len(_PAIRS))]
    )
    return (fewer_loss + more_loss) / 2 + RANKING_WEIGHT * fn.relu(more_loss - fewer_loss.detach())


@dataclass(frozen=True, slots=True, eq=False)
class TrainingItems:
    """Training items with synthesised voices, and with recorded ones by speaker."""

    synthesised: Items
    recorded: dict[str, Items]


@dataclass(frozen=True, slots=True, eq=False)
class TrainedVariant:
    """A network with its calibrations and its results by kind of items."""

    network: Network
    calibrations: dict[Subset, Calibration]
    samples: dict[str, dict[Subset, ConfidenceSample]]
    descriptions: dict[str, str]
    seconds: float


def draw_training_items(recordings: Recordings | None, count: int, advance: Callable[[], None]) -> TrainingItems:
    """Draw `count` items with synthesised voices, and as many with those of all recorded speakers together."""
    synthesised = _draw(ItemSource("train", TRAINING_SEED), count, advance)
    recorded = {}
    if recordings is not None:
        for name in recordings.present:
            source = ItemSource("train", RECORDED_SEED, recordings.of(name))
            recorded[name] = _draw(source, count // len(recordings.present), advance)
    return TrainingItems(synthesised, recorded)


def train_variant(
    name: str, items: TrainingItems, recordings: Recordings | None, held_out: int, advance: Advance
) -> TrainedVariant:
    """Train one variant and measure it on `held_out` items of each kind."""
    started, schedule = time.perf_counter(), SCHEDULES[name]
    network = build_network(VARIANTS[name], seed=schedule.seed)
    fit(network, items.synthesised, schedule, advance)
    folds = {
        speaker: _tune(name, network, items.synthesised, _others(items.recorded, speaker), advance)
        for speaker in items.recorded
    }
    return measure_variant(network, folds, recordings, held_out, time.perf_counter() - started)


def measure_variant(
    network: Network, folds: Mapping[str, Network], recordings: Recordings | None, held_out: int, seconds: float
) -> TrainedVariant:
    """Calibrate and measure on `held_out` items of each kind.

    `network`, trained on synthesised voices only, is shipped if there are no `folds`, networks by the speaker they were
    not trained on.
    """
    scored = {
        speaker: ScoredItems.of(fold, _held_out(recordings, speaker, held_out)) for speaker, fold in folds.items()
    }
    fold_calibrations = {
        speaker: ScoredItems.concatenate(_others(scored, speaker)).fit_calibrations() for speaker in scored
    }
    if recordings is None:
        calibration_items = ItemSource("held-out", CALIBRATION_SEED, part=(1, 2)).items(0, CALIBRATION_ITEMS)
        calibrations = ScoredItems.of(network, calibration_items).fit_calibrations()
    else:
        shipped = next(speaker for speaker in folds if speaker not in training_speakers(recordings))
        network, calibrations = folds[shipped], fold_calibrations[shipped]
    items = ItemSource("held-out", HELD_OUT_SEED, part=(0, 2)).items(0, held_out)
    samples = {SYNTHESISED: ScoredItems.of(network, items).calibrated(calibrations)}
    descriptions = {SYNTHESISED: "synthesised voices other than those in training; held-out handwriting"}
    if recordings is not None:
        samples[RECORDED] = concatenate_samples(
            fold_items.calibrated(fold_calibrations[speaker]) for speaker, fold_items in scored.items()
        )
        descriptions[RECORDED] = (
            f"real recordings ({recordings.source}) of {', '.join(scored)}, each speaker measured with weights "
            "trained on the others; held-out handwriting"
        )
    for subset, calibration in calibrations.items():
        network.calibrate(subset, calibration)
    return TrainedVariant(prepare_for_serving(network), calibrations, samples, descriptions, seconds)


def _tune(name: str, network: Network, synthesised: Items, recorded: Sequence[Items], advance: Advance) -> Network:
    """Train a copy further on synthesised and recorded voices in equal parts."""
    tuned, first = copy.deepcopy(network), SCHEDULES[name]
    schedule = Schedule(TUNING_STEPS[name], first.batch, first.peak_rate * TUNING_RATE, first.seed + 100)
    fit(tuned, _concatenate([synthesised, *recorded]), schedule, advance)
    return tuned


def _concatenate(parts: Sequence[Items]) -> Items:
    fields = ("audio", "video", "text", "digit")
    return Items(*(np.concatenate([getattr(part, field) for part in parts]) for field in fields))


def _others(by_speaker: Mapping[str, Value], speaker: str) -> list[Value]:
    return [value for name, value in by_speaker.items() if name != speaker]


def _held_out(recordings: Recordings | None, speaker: str, count: int) -> Items:
    if recordings is None:
        raise ValueError("a speaker's fold cannot be measured without recordings")
    speakers = recordings.present
    share, index = count // len(speakers), speakers.index(speaker)
    source = ItemSource("held-out", HELD_OUT_SEED, recordings.of(speaker), part=(index, len(speakers)))
    return source.items(index * share, share)


def _draw(source: ItemSource, count: int, advance: Callable[[], None]) -> Items:
    parts = []
    for start in range(0, count, 100):
        parts.append(source.items(start, min(100, count - start)))
        advance()
    return _concatenate(parts)


def _report(name: str, trained: TrainedVariant, weights: Path) -> MeasuredVariant:
    kinds = trained.samples
    return MeasuredVariant(
        name=name,
        on={kind: measurement_document(trained.descriptions[kind], samples) for kind, samples in kinds.items()},
        primary=RECORDED if RECORDED in kinds else SYNTHESISED,
        temperatures={subset_name(subset): round(trained.calibrations[subset].temperature, 3) for subset in SUBSETS},
        training={
            "seed": SCHEDULES[name].seed,
            "steps": SCHEDULES[name].steps,
            "tuning_steps": TUNING_STEPS[name] if RECORDED in kinds else 0,
            "seconds": round(trained.seconds),
            "parameters": sum(parameter.numel() for parameter in trained.network.parameters()),
            "weights_bytes": weights.stat().st_size,
        },
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and measure the chosen variants."""
    parser = argument_parser("Train and measure the models of the digits-av pipeline.", VARIANTS)
    parser.add_argument("--recordings", type=Path, metavar="DATA", help="fsdd_dev.npz, or the folder that holds it")
    options = parser.parse_args(arguments)
    recordings = None if options.recordings is None else load_recordings(options.recordings)
    try:
        provenance = data_provenance(recordings)
    except ValueError as error:
        parser.error(str(error))
    path = options.output / "measured.json"
    variants = _load_variants(path)
    with training_progress(options.threads) as progress:
        task = progress.add_task("draw items", total=None, note="")
        items = draw_training_items(recordings, TRAINING_ITEMS, lambda: progress.update(task, advance=1))
        for name in options.only or list(VARIANTS):
            steps = SCHEDULES[name].steps + TUNING_STEPS[name] * len(items.recorded)
            trained = train_variant(name, items, recordings, HELD_OUT_ITEMS, loss_bar(progress, name, steps))
            weights = options.output / "weights" / f"{name}.safetensors"
            save(trained.network, weights, {"seconds": f"{trained.seconds:.0f}", **provenance})
            variants[name] = _report(name, trained, weights)
            write_json(path, MeasuredPipeline(variants=tuple(variants[key] for key in VARIANTS if key in variants)))
            progress.console.print(f"{name} trained in {trained.seconds:.0f} s")
    pipeline = options.output / "pipeline.yaml"
    if pipeline.is_file():
        write_points(pipeline, MeasuredPipeline(variants=tuple(variants.values())))
    return 0


def data_provenance(recordings: Recordings | None) -> dict[str, str]:
    """Metadata of weights: their training speakers and the file of the recordings."""
    speakers = () if recordings is None else training_speakers(recordings)
    return {SPEAKERS_KEY: json.dumps(speakers), RECORDINGS_KEY: "" if recordings is None else recordings.source}


def _load_variants(path: Path) -> dict[str, MeasuredVariant]:
    if not path.is_file():
        return {}
    document = MeasuredPipeline.model_validate_json(path.read_text())
    return {variant.name: variant for variant in document.variants}


if __name__ == "__main__":
    sys.exit(main())
