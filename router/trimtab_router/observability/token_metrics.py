"""Metrics of streamed responses, by modality: text-only chats and chats with images."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram

from trimtab_pipelines import router_metrics as names
from trimtab_pipelines.spec import ServiceLevel
from trimtab_protocol.chat.internal_wire import Usage
from trimtab_router.execution.stream_timing import StreamTiming

MODALITIES = ("text", "image")
_FIRST_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_NEXT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_IMAGES_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64)


def buckets_around(buckets: Iterable[float], target_seconds: float | None) -> list[float]:
    """Histogram buckets that include fractions and multiples of a target."""
    targets = [target_seconds * factor for factor in (0.5, 1.0, 2.0)] if target_seconds else []
    return sorted({*buckets, *targets})


class TokenMetrics:
    """Time to first token, time between chunks, images and tokens of streamed responses."""

    def __init__(self, registry: CollectorRegistry, base: tuple[str, str], slo: ServiceLevel) -> None:
        labels = ("namespace", "pipeline", "modality")

        def histogram(name: str, text: str, buckets: Iterable[float]) -> dict[str, Histogram]:
            metric = Histogram(name, text, labels, buckets=list(buckets), registry=registry)
            return {modality: metric.labels(*base, modality) for modality in MODALITIES}

        self._first = histogram(
            names.TTFT_SECONDS,
            "Time to the first token in seconds",
            buckets_around(_FIRST_BUCKETS, slo.time_to_first_token_seconds),
        )
        self._next = histogram(
            names.TBT_SECONDS,
            "Time between two chunks of a response in seconds",
            buckets_around(_NEXT_BUCKETS, slo.time_per_output_token_seconds),
        )
        self._images = histogram(names.IMAGES, "Images per chat", _IMAGES_BUCKETS)
        tokens = Counter(
            names.TOKENS, "Total tokens of prompts (in) and responses (out)", (*labels, "direction"), registry=registry
        )
        self._tokens = {
            (modality, direction): tokens.labels(*base, modality, direction)
            for modality in MODALITIES
            for direction in ("in", "out")
        }

    def observe_stream(self, stream: StreamTiming, images: int) -> None:
        modality = MODALITIES[images > 0]
        self._images[modality].observe(images)
        if stream.time_to_first_token is not None:
            self._first[modality].observe(stream.time_to_first_token)
        for seconds in stream.gaps:
            self._next[modality].observe(seconds)

    def count_tokens(self, usage: Usage, images: int) -> None:
        modality = MODALITIES[images > 0]
        self._tokens[modality, "in"].inc(usage.prompt)
        self._tokens[modality, "out"].inc(usage.completion)
