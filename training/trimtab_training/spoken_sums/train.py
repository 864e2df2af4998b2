"""Training of the spoken-sums pipeline: `python -m trimtab_training.spoken_sums.train -o DIR`.

Writes `DIR/weights/VARIANT`, folders in the Hub's layout. Confidences are calibrated by a temperature that the last
layer's weights contain, on sums that neither training nor evaluation uses. `trimtab evaluate` measures the variants.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as fn
from sklearn.metrics import log_loss
from torch import Tensor, nn

from trimtab_model_servers.families.hf.speech import text_probabilities
from trimtab_training.confidence_fitting import best_temperature
from trimtab_training.digits_av.formant_synthesis import Split
from trimtab_training.spoken_sums.batches import Features
from trimtab_training.spoken_sums.dataset import SumSource, draw_words, evaluate, to_text
from trimtab_training.spoken_sums.models import SIZES, STRIDES, TOKENIZERS, build, feature_extractor, word_tokenizer
from trimtab_training.trainer import Advance, Schedule, argument_parser, loss_bar, train_network, training_progress

TRAINING_SUMS, CALIBRATION_SUMS, TRAINING_TEXTS = 6_000, 500, 400_000
TRAINING_SEED, CALIBRATION_SEED = 31, 32
SCHEDULES: Final[Mapping[str, Schedule]] = {
    "transcribe-s": Schedule(steps=1_500, batch=32, peak_rate=1.5e-2, seed=1),
    "transcribe-m": Schedule(steps=1_200, batch=32, peak_rate=1e-2, seed=2),
    "transcribe-l": Schedule(steps=900, batch=32, peak_rate=3e-3, seed=4),
    "answer-xs": Schedule(steps=4_000, batch=256, peak_rate=8e-3, seed=6),
    "answer-s": Schedule(steps=4_000, batch=256, peak_rate=8e-3, seed=5),
    "answer-l": Schedule(steps=5_000, batch=256, peak_rate=3e-3, seed=7),
}
Texts = tuple[Tensor, Tensor, Tensor]
"""Token ids [n, 8], their mask, and results [n]."""
CTC_WEIGHT: Final = 0.3
BETAS: Final = (0.9, 0.98)
_TEMPERATURES: Final = np.geomspace(0.5, 4.0, 60)


def frame_counts(model: Any, mask: Tensor) -> Tensor:
    counts: Tensor = model._get_subsampling_output_length(mask.sum(dim=1))  # noqa: SLF001 - no public name
    return counts


def fit_transcriber(model: Any, pool: Features, schedule: Schedule, advance: Advance, stride: int = 1) -> None:
    """Train by the words' places, which makes the sequence loss converge in a fraction of the steps."""
    random = torch.Generator().manual_seed(schedule.seed)

    def loss() -> Tensor:
        features, mask, tokens, targets = pool.draw(schedule.batch, random, stride)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_features=features, attention_mask=mask).logits.float()
        sequence = fn.ctc_loss(
            logits.log_softmax(dim=-1).transpose(0, 1),
            torch.cat(tokens),
            frame_counts(model, mask),
            torch.tensor([len(row) for row in tokens]),
            zero_infinity=True,
        )
        return fn.cross_entropy(logits.flatten(0, 1), targets.flatten()) + CTC_WEIGHT * sequence

    train_network(model, loss, schedule, betas=BETAS, advance=advance)


def fit_answerer(model: Any, texts: Texts, schedule: Schedule, advance: Advance) -> None:
    random = torch.Generator().manual_seed(schedule.seed)
    ids, mask, results = texts

    def loss() -> Tensor:
        rows = torch.randint(len(ids), (schedule.batch,), generator=random)
        return fn.cross_entropy(model(input_ids=ids[rows], attention_mask=mask[rows]).logits, results[rows])

    train_network(model, loss, schedule, betas=BETAS, advance=advance)


def draw_texts(split: Split, count: int, seed: int) -> Texts:
    random, tokenizer = np.random.default_rng(seed), word_tokenizer("PreTrainedTokenizerFast")
    drawn = [draw_words(split, random) for _ in range(count)]
    encoded = tokenizer([to_text(words) for words in drawn], padding=True, return_tensors="pt")
    return encoded["input_ids"], encoded["attention_mask"], torch.tensor([evaluate(words) for words in drawn])


def transcriber_temperature(model: Any, pool: Features, stride: int = 1) -> float:
    """Temperature with the highest likelihood of the measured correctness, given the probabilities of texts."""
    scores, right = [list[float]() for _ in _TEMPERATURES], list[bool]()
    for features, mask, tokens, _ in pool.batches(32, stride):
        with torch.inference_mode():
            logits, counts = model(input_features=features, attention_mask=mask).logits, frame_counts(model, mask)
        for found, temperature in zip(scores, _TEMPERATURES, strict=True):
            found.extend(text_probabilities(logits / temperature, counts, 0).tolist())
        for row, count, spoken in zip(logits.argmax(dim=-1), counts.tolist(), tokens, strict=True):
            path = row[:count].unique_consecutive()
            right.append(torch.equal(path[path != 0], spoken))
    losses = [log_loss(right, np.clip(found, 1e-6, 1 - 1e-6), labels=[False, True]) for found in scores]
    return float(_TEMPERATURES[int(np.argmin(losses))])


def answerer_temperature(model: Any, texts: Texts) -> float:
    ids, mask, results = texts
    with torch.inference_mode():
        return best_temperature(model(input_ids=ids, attention_mask=mask).logits, results)


def divide_logits(layer: nn.Module, temperature: float) -> None:
    """Make a last linear layer return its logits divided by a temperature."""
    with torch.no_grad():
        for weights in layer.parameters():
            weights.div_(temperature)


class Suite:
    """Training data of both stages, drawn when they are first needed."""

    @cached_property
    def sums(self) -> Features:
        return Features(SumSource("train", TRAINING_SEED), TRAINING_SUMS)

    @cached_property
    def calibration_sums(self) -> Features:
        return Features(SumSource("held-out", CALIBRATION_SEED), CALIBRATION_SUMS)

    @cached_property
    def texts(self) -> Texts:
        return draw_texts("train", TRAINING_TEXTS, TRAINING_SEED)

    def train(self, variant: str, folder: Path, schedule: Schedule, advance: Advance) -> None:
        """Train and calibrate a variant, and write its folder."""
        model = build(variant, schedule.seed)
        if variant.startswith("answer"):
            fit_answerer(model, self.texts, schedule, advance)
            texts = draw_texts("held-out", 4 * CALIBRATION_SUMS, CALIBRATION_SEED)
            divide_logits(model.classifier, answerer_temperature(model, texts))
        else:
            stride = STRIDES.get(variant, 1)
            fit_transcriber(model, self.sums, schedule, advance, stride)
            divide_logits(model.ctc_head, transcriber_temperature(model, self.calibration_sums, stride))
            feature_extractor(stride).save_pretrained(folder)
        model.half().save_pretrained(folder)
        word_tokenizer(TOKENIZERS[variant.partition("-")[0]]).save_pretrained(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the chosen variants."""
    options = argument_parser("Train the models of the spoken-sums pipeline.", SIZES).parse_args(arguments)
    suite = Suite()
    with training_progress(options.threads) as progress:
        for variant in options.only or list(SIZES):
            advance = loss_bar(progress, variant, SCHEDULES[variant].steps)
            suite.train(variant, options.output / "weights" / variant, SCHEDULES[variant], advance)
    return 0


if __name__ == "__main__":
    sys.exit(main())
