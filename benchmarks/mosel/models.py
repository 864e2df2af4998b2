"""The paper's five models: which senses each has, how fast and how accurate each subset is.

The paper prints few figures of its models (its figure 1 is a plot). What it prints stands here as it is: TVLT's three
accuracies and the 11 times that its audio is faster, the most queries a second each model was offered (twice what it
carries, section 7.1), and the gain in throughput of each. The rest is chosen so that the cheapest subset is as much
faster as that gain, and ordered as the paper's words say (appendix E); `assumed` names it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

FIXED_SHARE = 0.1
"""Of the seconds of a full batch, what a batch costs however small."""
FULL_BATCH = 64


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the paper.

    Attributes:
        name: as the paper calls it.
        accuracy: of each subset of its senses, by their letters.
        latency: of each subset, in parts of that of all senses.
        most_rps: queries a second it was offered at most; all senses carry half of it.
        gains: the paper's gain in throughput, and in points of SLO violations.
        assumed: which of these figures the paper does not print.
    """

    name: str
    accuracy: Mapping[str, float]
    latency: Mapping[str, float]
    most_rps: float
    gains: tuple[float, float]
    assumed: str

    @property
    def senses(self) -> str:
        """All of them."""
        return max(self.accuracy, key=len)

    def law(self, subset: str) -> tuple[float, float]:
        """Seconds of a batch: constant, and for each row; full batches of all senses carry half of `most_rps`."""
        full = self.latency[subset] * FULL_BATCH / (0.5 * self.most_rps)
        return FIXED_SHARE * full, (1 - FIXED_SHARE) * full / FULL_BATCH

    def seconds(self, subset: str, rows: float) -> float:
        """Seconds of a batch."""
        constant, linear = self.law(subset)
        return constant + linear * rows


MODELS = (
    Model(
        "TVLT",
        {"A": 0.67, "V": 0.70, "AV": 0.80},
        {"A": 1 / 11, "V": 0.90, "AV": 1.0},
        60,
        (5.3, 25),
        "the latency of video",
    ),
    Model(
        "AVHuBERT",
        {"V": 0.62, "A": 0.90, "AV": 0.94},
        {"V": 0.95, "A": 0.45, "AV": 1.0},
        20,
        (2.2, 15),
        "accuracies and latencies; audio is faster by the gain",
    ),
    Model(
        "TBN",
        {"I": 0.40, "A": 0.46, "V": 0.55, "IA": 0.52, "IV": 0.60, "AV": 0.62, "IAV": 0.66},
        {"I": 0.34, "A": 0.36, "V": 0.32, "IA": 0.69, "IV": 0.65, "AV": 0.67, "IAV": 1.0},
        40,
        (3.1, 17),
        "accuracies and latencies, in the paper's order; video is faster by the gain",
    ),
    Model(
        "MMSA",
        {"T": 0.838, "A": 0.60, "V": 0.60, "TA": 0.845, "TV": 0.845, "AV": 0.63, "TAV": 0.852},
        {"T": 0.89, "A": 0.80, "V": 0.80, "TA": 0.95, "TV": 0.95, "AV": 0.85, "TAV": 1.0},
        100,
        (1.12, 4),
        "all but the best accuracy; text is faster by the gain, the others hardly more",
    ),
    Model(
        "ViLT",
        {"I": 0.42, "T": 0.58, "TI": 0.64},
        {"I": 0.88, "T": 1 / 4.3, "TI": 1.0},
        40,
        (4.3, 18),
        "accuracies and latencies; text is faster by the gain",
    ),
)
