"""Tables 6 to 15 of the IPA paper (Ghafouri et al., JSys 4(1), 2024), and its pipelines."""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.papers.ipa_cells import PAPER_VIDEO
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.spec import InferencePipeline

FOLDER = Path(__file__).parents[1] / "pipelines"


@dataclass(frozen=True, slots=True)
class Row:
    """A variant: parameters in millions, base allocation in cores, accuracy in percent."""

    millions: float
    cores: int
    accuracy: float


VARIANTS = {
    "yolov5n": Row(1.9, 1, 45.7),
    "yolov5s": Row(7.2, 1, 56.8),
    "yolov5m": Row(21.2, 2, 64.1),
    "yolov5l": Row(46.5, 4, 67.3),
    "yolov5x": Row(86.7, 8, 68.9),
    "resnet18": Row(11.7, 1, 69.75),
    "resnet34": Row(21.8, 1, 73.31),
    "resnet50": Row(25.5, 1, 76.13),
    "resnet101": Row(44.54, 1, 77.37),
    "resnet152": Row(60.2, 2, 78.31),
    "s2t-small": Row(29.5, 1, 58.72),
    "s2t-medium": Row(71.2, 2, 64.88),
    "wav2vec2-base": Row(94.4, 2, 66.15),
    "s2t-large": Row(267.8, 4, 66.74),
    "wav2vec2-large": Row(315.5, 8, 72.35),
    "xlm-roberta-base": Row(277.45, 1, 77.14),
    "xlm-roberta-large": Row(558.8, 1, 83.79),
    "distilbart-1-1": Row(82.9, 1, 32.26),
    "distilbart-12-1": Row(221.5, 2, 33.37),
    "distilbart-6-6": Row(229.9, 4, 35.73),
    "distilbart-12-3": Row(255.1, 8, 36.39),
    "distilbart-9-6": Row(267.7, 8, 36.61),
    "distilbart-12-6": Row(305.5, 16, 36.99),
    "distilbert": Row(66.9, 1, 79.6),
    "bert": Row(109.4, 1, 79.9),
    "roberta": Row(355.3, 1, 83.0),
    "xlm-roberta-base-langid": Row(278.0, 1, 79.62),
    "opus-mt-fr-en": Row(74.6, 4, 33.1),
    "opus-mt-tc-big-fr-en": Row(230.6, 8, 34.4),
}
"""Tables 7 to 14. What the paper calls roberta-base and -large of question answering are XLM-R by their size."""

BESIDE_THE_TABLES = {"roberta-base": Row(124.06, 1, 82.91), "distilbert-sst2": Row(66.96, 1, 91.1)}
"""Variants that only the paper's code names."""

ACCURACY_OF_THE_PLOTS = {"xlm-roberta-base-langid": 99.59}
"""Where the paper's figures are drawn with another accuracy than its table prints."""

STAGE_SECONDS = {
    "video": (4.62, 2.27),
    "audio-qa": (8.34, 0.89),
    "audio-sent": (8.34, 1.08),
    "sum-qa": (2.52, 1.32),
    "nlp": (0.97, 12.76, 3.87),
}
"""Table 6, by pipeline."""

WEIGHTS = {"video": (2, 1), "audio-qa": (10, 0.5), "audio-sent": (30, 0.5), "sum-qa": (10, 0.5), "nlp": (40, 0.5)}
"""Table 15, α and β; δ is 1e-6 in all."""


def ipa_pipeline(name: str) -> InferencePipeline:
    """A pipeline with the paper's variants; pipelines/video has other detectors."""
    return load_pipeline(PAPER_VIDEO if name == "video" else FOLDER / name)
