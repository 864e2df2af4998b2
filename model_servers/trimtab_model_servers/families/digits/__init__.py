"""Networks of the digits pipeline: locators that find digits on a page, readers that classify one digit."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

PAGE_SIDE_PX: Final = 96


@dataclass(frozen=True, slots=True)
class Calibration:
    """Logistic calibration of confidences (Platt 1999); the identity by default."""

    offset: float = 0.0
    slope: float = 1.0

    def apply(self, raw: "Tensor") -> "Tensor":
        """Map raw confidences 0…1 to probabilities of a correct result."""
        return raw.logit(1e-6).mul_(self.slope).add_(self.offset).sigmoid_()
