"""Metrics of answers that are written piece by piece: by modality, as prompts with images and without differ."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

from trimtab_pipelines import router_metrics as names
from trimtab_pipelines.spec import ServiceLevel
from trimtab_protocol.chat.internal_wire import Usage
from trimtab_router.request.stream_timing import StreamTiming

MODALITIES = ("text", "image")
_FIRST_EDGES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_NEXT_EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_IMAGES_EDGES = (0, 1, 2, 4, 8, 16, 32, 64)


def buckets_around(edges: Iterable[float], promised_seconds: float | None) -> list[float]:
    """Edges of a histogram, among them what was promised."""
    promised = [promised_seconds * times for times in (0.5, 1.0, 2.0)] if promised_seconds else []
    return sorted({*edges, *promised})


class TokenMetrics:
    """What answers written piece by piece are measured by."""

    def __init__(self, registry: CollectorRegistry, base: tuple[str, str], slo: ServiceLevel) -> None:
        labels = ("namespace", "pipeline", "modality")

        def histogram(name: str, text: str, edges: Iterable[float]) -> dict[str, Histogram]:
            made = Histogram(name, text, labels, buckets=list(edges), registry=registry)
            return {modality: made.labels(*base, modality) for modality in MODALITIES}

        self._first = histogram(
            names.FIRST_PIECE_SECONDS,
            "From arrival to the first piece of an answer",
            buckets_around(_FIRST_EDGES, slo.time_to_first_token_seconds),
        )
        self._next = histogram(
            names.NEXT_PIECE_SECONDS,
            "From one piece of an answer to the next",
            buckets_around(_NEXT_EDGES, slo.time_per_output_token_seconds),
        )
        self._images = histogram(names.IMAGES, "Images of a chat", _IMAGES_EDGES)
        tokens = Counter(
            names.TOKENS, "Tokens of prompts (in) and answers (out)", (*labels, "direction"), registry=registry
        )
        self._tokens = {
            (modality, direction): tokens.labels(*base, modality, direction)
            for modality in MODALITIES
            for direction in ("in", "out")
        }

    def delivered(self, delivery: StreamTiming, images: int) -> None:
        """Count an answer, or as much of it as came."""
        modality = MODALITIES[images > 0]
        self._images[modality].observe(images)
        if delivery.first_seconds is not None:
            self._first[modality].observe(delivery.first_seconds)
        for seconds in delivery.gaps:
            self._next[modality].observe(seconds)

    def took(self, usage: Usage, images: int) -> None:
        """Count the tokens of an answer that is whole."""
        modality = MODALITIES[images > 0]
        self._tokens[modality, "in"].inc(usage.prompt)
        self._tokens[modality, "out"].inc(usage.completion)
