"""Results of locators and readers on held-out pages, and the calibrations of confidences that are fitted to them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab_model_servers.families.digits import Calibration
from trimtab_model_servers.families.digits.locator import Locator
from trimtab_model_servers.families.digits.reader import Reader
from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.escalation_evidence import ScoredRows
from trimtab_training.confidence_fitting import calibration_error
from trimtab_training.digits.page_generator import Page, match_boxes

_BATCH: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class LocatorOutput:
    """Matched crops of one locator, and its pages with uncalibrated confidences."""

    crops: Tensor
    """uint8 [n, 1, 28, 28]."""
    labels: NDArray[np.int64]
    """[n], the digit on each crop."""
    pages: ScoredRows
    """Matched digits and answers of each page, including missed and invented ones."""


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
    with torch.inference_mode():
        digits, confidences = zip(*(reader(crops) for crops in torch.split(located.crops, _BATCH)), strict=True)
    right = torch.cat(digits).numpy() == located.labels
    return ScoredRows(torch.cat(confidences).numpy(), right.astype(np.int64), np.ones_like(located.labels))


def score_rows(networks: Mapping[str, Locator | Reader], pages: Sequence[Page]) -> dict[str, ScoredRows]:
    """Score pages for locators; for readers, the crops that each locator finds on its share of the pages."""
    locators = [network for network in networks.values() if isinstance(network, Locator)]
    located = [locate_all(locator, pages[turn :: len(locators)]) for turn, locator in enumerate(locators)]
    return {
        name: locate_all(network, pages).pages
        if isinstance(network, Locator)
        else ScoredRows.concatenate([read_all(network, output) for output in located])
        for name, network in networks.items()
    }


def fit_calibration(rows: ScoredRows) -> tuple[Calibration, float]:
    """Fit the logistic calibration to whether all of a row's results are correct; the error is that of other rows."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 - slow to import

    confidences, right = torch.from_numpy(rows.confidence), rows.sample().right
    fitted = LogisticRegression(C=1e6).fit(confidences[::2].double().logit(1e-6).numpy()[:, None], right[::2])
    calibration = Calibration(round(float(fitted.intercept_[0]), 3), round(float(fitted.coef_[0, 0]), 3))
    return calibration, calibration_error(calibration.apply(confidences[1::2]).numpy(), right[1::2])


def write_calibrations(path: Path, calibrations: Mapping[str, Calibration]) -> None:
    """Set the parameters of variants in a pipeline file, if it exists."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    for name, fitted in calibrations.items():
        parameters = f"{{confidence_offset: {fitted.offset}, confidence_slope: {fitted.slope}}}"
        text = re.sub(rf"(- name: {name}\n(?:      .*\n)*?      parameters: ).*", rf"\g<1>{parameters}", text)
    write_atomically(path, text)
