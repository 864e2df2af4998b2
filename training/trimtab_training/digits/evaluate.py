"""Accuracy of locators, readers and their pairs on held-out pages, and the rows that escalations are measured on.

A reader is measured on the crops that all locators deliver, matched digits only, because the pipeline gives it such
crops. The accuracy of a pair should then be the product of its stages' accuracies; the report states the difference.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab_model_servers.families.digits.locator import Locator
from trimtab_model_servers.families.digits.reader import Reader
from trimtab_pipelines.accuracy_evidence import Accuracy, measured_accuracy
from trimtab_pipelines.escalation_evidence import ScoredRows
from trimtab_training.digits.page_generator import Page, match_boxes

_BATCH: Final = 16
_TIMED_BATCHES: Final = 20


@dataclass(frozen=True, slots=True)
class Measurement:
    """Accuracies on one set of pages, by variant, and by pair of a locator and a reader."""

    stages: Mapping[str, Accuracy]
    pairs: Mapping[tuple[str, str], Accuracy]
    rows: Mapping[str, ScoredRows]
    """By variant: all pages of a locator, and each page's crops by one of the locators, in turn, of a reader."""
    seconds: Mapping[str, float]
    """Processor time of a row, by variant."""
    page_of_crop: NDArray[np.int64]
    """Of the rows of readers."""
    label_of_crop: NDArray[np.int64]

    def product(self, pair: tuple[str, str]) -> float:
        """Product of the accuracies of a pair's stages."""
        return math.prod(self.stages[name].value for name in pair)

    @property
    def largest_product_error(self) -> float:
        """Largest difference between a pair's accuracy and the product of its stages."""
        return max((abs(self.product(pair) - accuracy.value) for pair, accuracy in self.pairs.items()), default=0.0)


@dataclass(frozen=True, slots=True, eq=False)
class LocatorOutput:
    """Matched crops of one locator, and its pages with uncalibrated confidences."""

    crops: Tensor
    """uint8 [n, 1, 28, 28]."""
    labels: NDArray[np.int64]
    """[n], the digit on each crop."""
    pages: ScoredRows
    """Matched digits and answers of each page, including missed and invented ones."""

    @property
    def total(self) -> int:
        return int(self.pages.total.sum())

    @property
    def page_of_crop(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(self.pages.correct.size), self.pages.correct)


def locate_all(locator: Locator, pages: Sequence[Page]) -> LocatorOutput:
    """Run a locator over pages and keep the crops that match a digit."""
    crops, labels, scores, confidences = [], [], [], []
    for start in range(0, len(pages), _BATCH):
        batch = pages[start : start + _BATCH]
        with torch.inference_mode():
            count, boxes, batch_crops, confidence = locator(torch.from_numpy(np.stack([page.pixels for page in batch])))
        ends = count.cumsum(0).tolist()
        confidences.append(confidence.numpy())
        for page, first, end in zip(batch, [0, *ends[:-1]], ends, strict=True):
            digit = match_boxes(page, boxes[first:end].numpy())
            crops.append(batch_crops[first:end][torch.from_numpy(digit >= 0)])
            labels.append(page.labels[digit[digit >= 0]])
            scores.append((len(labels[-1]), max(len(page.labels), end - first)))
    rows = ScoredRows(np.concatenate(confidences), *np.array(scores).T)
    return LocatorOutput(torch.cat(crops), np.concatenate(labels), rows)


def read_all(reader: Reader, located: LocatorOutput) -> ScoredRows:
    """Run a reader over the crops of a locator."""
    digits, confidences = [], []
    for crops in torch.split(located.crops, _BATCH):
        with torch.inference_mode():
            digit, confidence = reader(crops)
        digits.append(digit.numpy())
        confidences.append(confidence.numpy())
    right = np.concatenate(digits) == located.labels
    return ScoredRows(np.concatenate(confidences), right.astype(np.int64), np.ones_like(located.labels))


def row_seconds(network: Locator | Reader, rows: Tensor) -> float:
    """Processor time of a row in full batches."""
    batches = torch.split(rows[: _BATCH * _TIMED_BATCHES], _BATCH)
    with torch.inference_mode():
        network(batches[0])
        started = time.process_time()
        for batch in batches:
            network(batch)
    return (time.process_time() - started) / sum(len(batch) for batch in batches)


def measure(
    locators: Mapping[str, Locator],
    readers: Mapping[str, Reader],
    pages: Sequence[Page],
    advance: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Measure every variant and every pair; `advance` receives the name of each measured network.

    A digit that every locator finds is read once for each of them, so a reader's n is the mean number of digits a
    locator finds, not the number of crops: its interval is then as wide as the handwriting behind it allows.
    """
    stages: dict[str, Accuracy] = {}
    located: dict[str, LocatorOutput] = {}
    rows, seconds = dict[str, ScoredRows](), dict[str, float]()
    images = torch.from_numpy(np.stack([page.pixels for page in pages[: _BATCH * _TIMED_BATCHES]]))
    for name, locator in locators.items():
        located[name] = locate_all(locator, pages)
        seconds[name] = row_seconds(locator, images)
        rows[name] = located[name].pages
        stages[name] = measured_accuracy(len(located[name].labels), located[name].total)
        advance(name)
    pairs: dict[tuple[str, str], Accuracy] = {}
    matched = sum(len(output.labels) for output in located.values())
    turns = [output.page_of_crop % len(located) == turn for turn, output in enumerate(located.values())]
    for name, reader in readers.items():
        seconds[name] = row_seconds(reader, next(iter(located.values())).crops)
        read = {locator: read_all(reader, output) for locator, output in located.items()}
        correct = {locator: int(scored.correct.sum()) for locator, scored in read.items()}
        n = round(matched / len(located))
        stages[name] = measured_accuracy(round(sum(correct.values()) / matched * n), n)
        pairs |= {(locator, name): measured_accuracy(hits, located[locator].total) for locator, hits in correct.items()}
        rows[name] = ScoredRows.concatenate([own.subset(turn) for own, turn in zip(read.values(), turns, strict=True)])
        advance(name)
    of_crops = [
        np.concatenate([values[turn] for values, turn in zip(listed, turns, strict=True)])
        for listed in ([o.page_of_crop for o in located.values()], [o.labels for o in located.values()])
    ]
    return Measurement(stages, pairs, rows, seconds, *of_crops)
