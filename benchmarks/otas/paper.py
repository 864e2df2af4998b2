"""The paper's model on its card: how fast and accurate each number of tokens is, who asks, what is assumed.

OTAS prints few of its figures (its figure 4 is a plot). What it prints stands here as it is: the throughput at 0 and
−15, both tables, the cliff below −15, the load. The throughputs between follow from table I, whose thresholds fall as
they do. Accuracies are not printed, but for the cliff: these have the order and the shape that the paper's words and
the published results of prompts and merging give. `ASSUMED` names all of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

FULL_BATCH = 64
FIXED_ROWS = 2.5
"""What a batch costs however small, in rows of a full one: small batches on a card are not as efficient (figure 7)."""


@dataclass(frozen=True, slots=True)
class Option:
    """A number of tokens, or a model: rows a second in full batches, accuracy by task."""

    name: str
    rps: float
    accuracy: Mapping[str, float]

    @property
    def mean_accuracy(self) -> float:
        """Over the paper's queries, which ask for its three tasks alike."""
        return sum(self.accuracy.values()) / len(self.accuracy)

    def seconds(self, rows: float) -> float:
        """Seconds of a batch."""
        row = FULL_BATCH / self.rps / (FULL_BATCH + FIXED_ROWS)
        return row * (FIXED_ROWS + rows)


@dataclass(frozen=True, slots=True)
class Query:
    """A type of query (table II)."""

    task: str
    seconds: float
    utility: float


def _option(name: str, rps: float, *accuracy: float) -> Option:
    return Option(name, rps, dict(zip(("cifar10", "cifar100", "eurosat"), accuracy, strict=True)))


GAMMAS = (
    _option("-20", 1250.0, 0.80, 0.55, 0.82),
    _option("-15", 1000.0, 0.925, 0.745, 0.925),
    _option("-10", 580.0 * 519 / 379, 0.94, 0.775, 0.935),
    _option("-5", 580.0 * 449 / 379, 0.947, 0.79, 0.94),
    _option("0", 580.0, 0.95, 0.80, 0.945),
    _option("2", 580.0 / 1.09, 0.965, 0.85, 0.96),
    _option("4", 580.0 / 1.19, 0.968, 0.86, 0.962),
    _option("8", 580.0 / 1.36, 0.97, 0.87, 0.965),
)
"""The paper's list."""
WON_BACK, PROMPT_SECONDS = 0.75, 1.02
"""Of what merging costs, what prompts and heads trained while it goes on win back, and times its seconds (vit-fine)."""


def trained_with_merging(option: Option, plain: Option) -> Option:
    """A strong number of tokens whose prompts and heads knew of the merging; the paper has none."""
    accuracy = {task: low + WON_BACK * (plain.accuracy[task] - low) for task, low in option.accuracy.items()}
    return Option(f"aware{option.name}", option.rps / PROMPT_SECONDS, accuracy)


MODELS = (
    _option("small", 580.0 * 953 / 309, 0.93, 0.75, 0.935),
    _option("base", 580.0, 0.95, 0.80, 0.945),
    _option("large", 580.0 * 95 / 309, 0.96, 0.83, 0.95),
)
"""ViT-S, -B and -L as fast beside each other as ToMe's README has them."""
LOAD_SECONDS = {"small": 0.23, "base": 0.77, "large": 6.2}
"""To make a model and read its weights, which lay in memory already: timm on one core, the better of two tries. The
paper does not print its own; one model is loaded at a time, as it has it."""
QUERIES = (
    Query("cifar10", 0.6, 0.3),
    Query("cifar10", 1.0, 0.01),
    Query("cifar100", 0.6, 1.0),
    Query("cifar100", 1.0, 0.2),
    Query("eurosat", 0.6, 0.3),
    Query("eurosat", 1.0, 0.01),
)
"""Table II."""
TABLE_RPS = ((279.0, "8"), (319.0, "4"), (349.0, "2"), (379.0, "0"), (449.0, "-5"), (519.0, "-10"), (1000.0, "-15"))
"""Table I: up to which rate each is taken, −20 above all; 349 and 1000, which it leaves out, go to the one before."""
MERGED, PROMPTED, PLAIN = "-15", "2", "0"
"""The fixed numbers of ToMe (the strongest before the cliff) and VPT (two prompts, section V), and PetS's."""
PAPER = {
    "utility over PetS": 0.182,
    "utility over INFaaS": 0.725,
    "type 1, synthetic": 0.8554,
    "type 1, MAF": 0.7558,
    "type 1 of VPT, MAF": 0.6414,
    "type 2 of ToMe, MAF": 0.1685,
}
ASSUMED = (
    "all accuracies but that they fall off below −15; throughputs at −20, −10, −5, 2, 4, 8 (by table I); what a small "
    "batch costs; how long the rate of the synthetic load stays as it is (2 to 20 s); accuracies of ViT-S and -L; "
    "seconds to load a model (measured with timm on a core); what prompts trained with merging win back, and take "
    "(measured on vit-fine)"
)
