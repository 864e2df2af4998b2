"""Accuracy of locators, readers and their pairs on held-out pages.

A reader is measured on the crops that all locators deliver, matched digits only, because the pipeline gives it such
crops. The accuracy of a pair should then be the product of its stages' accuracies; the report states the difference.
"""

import math
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
from trimtab_training.digits.page_generator import Page, match_boxes

_BATCH: Final = 16


@dataclass(frozen=True, slots=True)
class Measurement:
    """Accuracies on one set of pages, by variant, and by pair of a locator and a reader."""

    stages: Mapping[str, Accuracy]
    pairs: Mapping[tuple[str, str], Accuracy]

    def product(self, pair: tuple[str, str]) -> float:
        """Product of the accuracies of a pair's stages."""
        return math.prod(self.stages[name].value for name in pair)

    @property
    def largest_product_error(self) -> float:
        """Largest difference between a pair's accuracy and the product of its stages."""
        return max((abs(self.product(pair) - accuracy.value) for pair, accuracy in self.pairs.items()), default=0.0)


@dataclass(frozen=True, slots=True, eq=False)
class LocatorOutput:
    """Matched crops of one locator, and the number of expected answers."""

    crops: Tensor
    """uint8 [n, 1, 28, 28]."""
    labels: NDArray[np.int64]
    """[n], the digit on each crop."""
    total: int
    """Digits and answers, including missed and invented ones."""


def locate_all(locator: Locator, pages: Sequence[Page]) -> LocatorOutput:
    """Run a locator over pages and keep the crops that match a digit."""
    crops, labels, total = [], [], 0
    for start in range(0, len(pages), _BATCH):
        batch = pages[start : start + _BATCH]
        with torch.inference_mode():
            count, boxes, batch_crops = locator(torch.from_numpy(np.stack([page.pixels for page in batch])))
        ends = count.cumsum(0).tolist()
        for page, first, end in zip(batch, [0, *ends[:-1]], ends, strict=True):
            digit = match_boxes(page, boxes[first:end].numpy())
            crops.append(batch_crops[first:end][torch.from_numpy(digit >= 0)])
            labels.append(page.labels[digit[digit >= 0]])
            total += max(len(page.labels), end - first)
    return LocatorOutput(torch.cat(crops), np.concatenate(labels), total)


def read_all(reader: Reader, located: LocatorOutput) -> int:
    correct = 0
    for start in range(0, len(located.labels), _BATCH):
        with torch.inference_mode():
            digits, _ = reader(located.crops[start : start + _BATCH])
        correct += int((digits.numpy() == located.labels[start : start + _BATCH]).sum())
    return correct


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
    for name, locator in locators.items():
        located[name] = locate_all(locator, pages)
        stages[name] = measured_accuracy(len(located[name].labels), located[name].total)
        advance(name)
    pairs: dict[tuple[str, str], Accuracy] = {}
    matched = sum(len(output.labels) for output in located.values())
    for name, reader in readers.items():
        correct = {locator: read_all(reader, output) for locator, output in located.items()}
        n = round(matched / len(located))
        stages[name] = measured_accuracy(round(sum(correct.values()) / matched * n), n)
        pairs |= {(locator, name): measured_accuracy(hits, located[locator].total) for locator, hits in correct.items()}
        advance(name)
    return Measurement(stages, pairs)
