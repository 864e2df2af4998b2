"""Accuracy on held-out pages: each variant's own, with its interval, and that of every pair end to end.

A reader is measured on the crops that locators really deliver (all of them pooled, found digits only), because that
is what it is given in the pipeline. Then a pair's accuracy should be the product of its stages' accuracies; how far
it is off is written beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab_model_servers.families.digits.locator import Locator
from trimtab_model_servers.families.digits.reader import Reader
from trimtab_pipelines.accuracy_evidence import wilson_interval
from trimtab_training.digits.page_generator import Page, match_boxes

_BATCH: Final = 16


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A share of right answers with its 95 % Wilson interval."""

    value: float
    n: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PairAccuracy:
    """What a locator and a reader reach together, beside the product of their own accuracies."""

    locate: str
    read: str
    accuracy: Accuracy
    product: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """Everything measured on one set of pages."""

    stages: Mapping[str, Accuracy]
    pairs: tuple[PairAccuracy, ...]

    @property
    def largest_product_error(self) -> float:
        """Say by how much the product of the stages misses the worst pair."""
        return max((abs(pair.product - pair.accuracy.value) for pair in self.pairs), default=0.0)


@dataclass(frozen=True, slots=True, eq=False)
class LocatorOutput:
    """What one locator delivered: the crops that show a digit, and how many answers were due.

    Attributes:
        crops: uint8 [n, 1, 28, 28].
        labels: int64 [n], the digit each shows.
        total: digits and answers to account for, missed and invented ones included.
    """

    crops: Tensor
    labels: NDArray[np.int64]
    total: int


def wilson(right: int, n: int) -> Accuracy:
    """Wilson's 95 % interval of ``right`` out of ``n`` (Wilson 1927); it stays within 0…1.

    Raises:
        ValueError: when ``n`` is not positive.
    """
    low, high = wilson_interval(right, n)
    return Accuracy(right / n, n, low, high)


def locate_all(locator: Locator, pages: Sequence[Page]) -> LocatorOutput:
    """Run ``locator`` over ``pages`` and keep what it found."""
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


def read_all(reader: Reader, found: LocatorOutput) -> int:
    """Count the crops that ``reader`` reads rightly."""
    right, step = 0, _BATCH
    for start in range(0, len(found.labels), step):
        with torch.inference_mode():
            digits, _ = reader(found.crops[start : start + step])
        right += int((digits.numpy() == found.labels[start : start + step]).sum())
    return right


def measure(
    locators: Mapping[str, Locator],
    readers: Mapping[str, Reader],
    pages: Sequence[Page],
    advance: Callable[[str], None] = lambda _: None,
) -> Measurement:
    """Measure every variant and every pair on ``pages``; ``advance`` hears the name of each network done.

    A digit found by every locator is read once for each of them, so a reader's n is the mean number of digits a
    locator finds, not the number of crops: its interval is then as wide as the handwriting behind it allows.
    """
    stages: dict[str, Accuracy] = {}
    found: dict[str, LocatorOutput] = {}
    for name, locator in locators.items():
        found[name] = locate_all(locator, pages)
        stages[name] = wilson(len(found[name].labels), found[name].total)
        advance(name)
    right = {}
    for name, reader in readers.items():
        right[name] = {locator: read_all(reader, crops) for locator, crops in found.items()}
        matched = sum(len(crops.labels) for crops in found.values())
        n = round(matched / len(found))
        stages[name] = wilson(round(sum(right[name].values()) / matched * n), n)
        advance(name)
    pairs = (
        PairAccuracy(
            locate, read, wilson(right[read][locate], found[locate].total), stages[locate].value * stages[read].value
        )
        for locate in locators
        for read in readers
    )
    return Measurement(stages, tuple(pairs))
