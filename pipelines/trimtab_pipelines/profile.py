"""`ModelProfile`: measured latency and throughput of each operating point, by batch size and cores.

The fit is IPA's latency law l(b) = α b² + β b + γ (section 4.1). Measured batch sizes use their measurement; the fit is
used between and beyond them, bounded by the neighbouring measurements.
"""

import hashlib
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Literal, Self

from pydantic import Field, model_validator

from trimtab_pipelines.memory_profile import MemoryProfile, MemoryProfiles
from trimtab_pipelines.quantity import Cores, SecondsBySize
from trimtab_pipelines.resource import Model, Name, Resource, is_empty
from trimtab_pipelines.variants import ParameterValue


class Measurement(Model):
    """One batch size at saturation; every batch is full."""

    batch_size: int = Field(ge=1, le=4096)
    latency_seconds_mean: float = Field(ge=1e-9, le=1e9)
    latency_seconds_p50: float = Field(ge=1e-9, le=1e9)
    latency_seconds_p99: float = Field(ge=1e-9, le=1e9)
    throughput_rps: float = Field(ge=1e-9, le=1e12)
    """Rows per second of one replica."""
    batches: int = Field(ge=1)
    """Number of batches measured."""


class LatencyFit(Model):
    """l(b) = quadratic·b² + linear·b + constant, in seconds."""

    quadratic: float
    linear: float
    constant: float
    mean_relative_error: float = Field(ge=0)
    """Mean of |fit − measured| / measured."""

    def seconds(self, batch_size: float) -> float:
        return (self.quadratic * batch_size + self.linear) * batch_size + self.constant

    def max_seconds(self, low: float, high: float) -> float:
        """Maximum of the law between two batch sizes: at an end, or at the vertex of a downward parabola."""
        candidates = [self.seconds(low), self.seconds(high)]
        if self.quadratic < 0 and low < (vertex := -self.linear / (2.0 * self.quadratic)) < high:
            candidates.append(self.seconds(vertex))
        return max(candidates)


class LatencyCurve(Model):
    """Measurements by batch size, and the law fitted to them."""

    measurements: tuple[Measurement, ...] = Field(min_length=1, max_length=64)
    fit: LatencyFit

    @model_validator(mode="after")
    def _unique_batches(self) -> Self:
        _require_unique_batches(self.measurements)
        return self

    def interpolate(self, other: "LatencyCurve", share: float) -> "LatencyCurve":
        """The curve between this one (share 0) and another (share 1), for the batch sizes that both have.

        Seconds per row are interpolated linearly. A share above 1 extrapolates, but never below the lesser of both.
        """
        others = {measurement.batch_size: measurement for measurement in other.measurements}
        pairs = [(m, others[m.batch_size]) for m in self.measurements if m.batch_size in others]
        return LatencyCurve(
            measurements=tuple(_interpolate(start, end, share) for start, end in pairs),
            fit=LatencyFit(
                quadratic=_linear(self.fit.quadratic, other.fit.quadratic, share),
                linear=_linear(self.fit.linear, other.fit.linear, share),
                constant=_linear(self.fit.constant, other.fit.constant, share),
                mean_relative_error=max(self.fit.mean_relative_error, other.fit.mean_relative_error),
            ),
        )

    def with_row_seconds(self, row_seconds: float) -> "LatencyCurve":
        return LatencyCurve(
            measurements=tuple(_with_row_seconds(measurement, row_seconds) for measurement in self.measurements),
            fit=self.fit.replace(linear=self.fit.linear + row_seconds),
        )


def prefill_seconds(measured: Mapping[int, float], tokens: float) -> float:
    """Time to first token of a prompt on an otherwise idle replica, from seconds by number of tokens; else 0.

    Interpolates linearly between measured lengths. Below the shortest it returns the shortest's time; beyond the
    longest it extrapolates from the last two.
    """
    lengths = sorted(measured)
    if not lengths:
        return 0.0
    index = bisect_left(lengths, tokens)
    if index == 0 or len(lengths) == 1:
        return measured[lengths[0]]
    low, high = lengths[min(index, len(lengths) - 1) - 1], lengths[min(index, len(lengths) - 1)]
    slope = (measured[high] - measured[low]) / (high - low)
    return max(measured[low] + slope * (tokens - low), 0.0)


class ChatProfile(Model):
    """Chat-specific measurements of a generation stage, in addition to complete responses to chats with one image."""

    time_to_first_token: LatencyCurve
    """Time to first token of chats with one image."""
    text_only: LatencyCurve
    """Complete responses to text-only chats."""
    text_only_time_to_first_token: LatencyCurve
    """Time to first token of text-only chats."""
    tokens: float = Field(ge=1)
    """Mean number of output tokens of a response."""
    prompt_tokens: float = Field(default=0.0, ge=0, exclude_if=is_empty)
    """Mean number of prompt tokens of chats with one image, including the image's tokens in the prompt."""
    text_prompt_tokens: float = Field(default=0.0, ge=0, exclude_if=is_empty)
    """Mean number of prompt tokens of text-only chats."""
    prefill_seconds: SecondsBySize = Field(default_factory=dict, max_length=32, exclude_if=is_empty)
    """Median time to first token of a single text-only prompt, by its number of tokens."""

    def mean_prompt_tokens(self, images: float) -> float:
        """Mean prompt tokens of the measured chats at a number of images; 0 if the profile has no prefill times."""
        return _linear(self.text_prompt_tokens, self.prompt_tokens, images) if self.prefill_seconds else 0.0

    def extra_prefill_seconds(self, tokens: float, images: float) -> float:
        """Prefill seconds of a prompt beyond those of the measured prompts with as many images; 0 if it is shorter."""
        measured_tokens = self.mean_prompt_tokens(images)
        if not tokens > measured_tokens:
            return 0.0
        extra = prefill_seconds(self.prefill_seconds, tokens) - prefill_seconds(self.prefill_seconds, measured_tokens)
        return max(extra, 0.0)


class PointProfile(Model):
    """Measurements of one operating point of one variant with one allocation of cores."""

    variant: Name
    operating_point: Name = "default"
    cores: Cores = Field(gt=0)
    measurements: tuple[Measurement, ...] = Field(min_length=1, max_length=64)
    fit: LatencyFit
    chats: ChatProfile | None = Field(default=None, exclude_if=lambda chats: chats is None)
    """Measurements of a stage that serves chats."""

    def for_chats(self, images: float, prompt_tokens: float = 0.0) -> "PointProfile":
        """The profile for chats with a mean number of images and prompt tokens.

        Times are interpolated between chats without and with one image. Prompt tokens beyond the measured ones add
        their prefill time to each concurrent chat; shorter prompts cost as much as measured.
        """
        if self.chats is None:
            return self
        total = self.chats.text_only.interpolate(LatencyCurve(measurements=self.measurements, fit=self.fit), images)
        first = self.chats.text_only_time_to_first_token.interpolate(self.chats.time_to_first_token, images)
        extra = self.chats.extra_prefill_seconds(prompt_tokens, images)
        if extra:
            total, first = total.with_row_seconds(extra), first.with_row_seconds(extra)
        return self._with_curve(total, self.chats.replace(time_to_first_token=first))

    @cached_property
    def to_first_token(self) -> "PointProfile":
        """The profile with times to first token instead of complete responses, if the stage generates text."""
        return self if self.chats is None else self._with_curve(self.chats.time_to_first_token, None)

    def _with_curve(self, curve: LatencyCurve, chats: ChatProfile | None) -> "PointProfile":
        return PointProfile(
            variant=self.variant,
            operating_point=self.operating_point,
            cores=self.cores,
            measurements=curve.measurements,
            fit=curve.fit,
            chats=chats,
        )

    @cached_property
    def _by_batch(self) -> dict[int, Measurement]:
        return {measurement.batch_size: measurement for measurement in self.measurements}

    @cached_property
    def _fitted(self) -> dict[tuple[str, int], float]:
        """Estimates for batch sizes without a measurement, by field and size; each plan reads the same few."""
        return {}

    def latency_seconds(self, batch_size: int, quantile: float = 0.99) -> float:
        """Service time of a full batch: p99 for quantiles above 0.9, else the median.

        A batch size without a measurement uses the fit, scaled by the nearest measurement's ratio of the quantile to
        the mean and clamped to its neighbours. Beyond the largest measured size it is at least that size's latency.
        """
        field = "latency_seconds_p99" if quantile > 0.9 else "latency_seconds_p50"
        measured = self._by_batch.get(batch_size)
        if measured is not None:
            return float(getattr(measured, field))
        if (field, batch_size) not in self._fitted:
            nearest = min(self.measurements, key=lambda m: abs(m.batch_size - batch_size))
            ratio = float(getattr(nearest, field)) / nearest.latency_seconds_mean
            seconds = self._clamp(self._mean_seconds(batch_size) * ratio, batch_size, field)
            self._fitted[field, batch_size] = seconds
        return self._fitted[field, batch_size]

    def throughput_rps(self, batch_size: int) -> float:
        """Rows per second of one saturated replica with full batches.

        A batch size without a measurement has at most the better throughput of its neighbours; beyond all measurements,
        of the best.
        """
        measured = self._by_batch.get(batch_size)
        if measured is not None:
            return measured.throughput_rps
        key = "throughput_rps", batch_size
        if key not in self._fitted:
            self._fitted[key] = min(batch_size / self._mean_seconds(batch_size), self._max_rps(batch_size))
        return self._fitted[key]

    def _mean_seconds(self, batch_size: int) -> float:
        """Mean latency of a batch size without a measurement: the fit, clamped to its neighbours.

        The fit counts with its maximum since the next smaller size, since latency does not decrease with batch size.
        """
        below, _ = self._neighbours(batch_size)
        fitted = self.fit.max_seconds(batch_size if below is None else below.batch_size, batch_size)
        fitted = max(fitted, batch_size / self._max_rps(batch_size))
        return self._clamp(fitted, batch_size, "latency_seconds_mean")

    def _clamp(self, seconds: float, batch_size: int, field: str) -> float:
        """Seconds clamped to the neighbours' measurements; beyond the largest size, at least its measurement."""
        below, above = self._neighbours(batch_size)
        low = 0.0 if below is None else float(getattr(below, field))
        high = math.inf if above is None else float(getattr(above, field))
        return min(max(seconds, min(low, high)), max(low, high))

    def _max_rps(self, batch_size: int) -> float:
        """Bound on the throughput of a batch size without a measurement: the better neighbour, or the best of all."""
        below, above = self._neighbours(batch_size)
        measurements = self.measurements if below is None or above is None else (below, above)
        return max(measurement.throughput_rps for measurement in measurements)

    def _neighbours(self, batch_size: int) -> tuple[Measurement | None, Measurement | None]:
        """Measurements of the next smaller and the next larger batch size; None if there is none."""
        smaller = (m for m in self.measurements if m.batch_size < batch_size)
        larger = (m for m in self.measurements if m.batch_size > batch_size)
        return (
            max(smaller, key=lambda m: m.batch_size, default=None),
            min(larger, key=lambda m: m.batch_size, default=None),
        )

    @model_validator(mode="after")
    def _unique_batches(self) -> Self:
        _require_unique_batches(self.measurements)
        return self


def _require_unique_batches(measurements: Sequence[Measurement]) -> None:
    if len({measurement.batch_size for measurement in measurements}) < len(measurements):
        raise ValueError("measurements has a duplicate batchSize")


def _interpolate(start: Measurement, end: Measurement, share: float) -> Measurement:
    def line(low: float, high: float) -> float:
        return max(_linear(low, high, share), min(low, high))

    between = {
        "latency_seconds_mean": line(start.latency_seconds_mean, end.latency_seconds_mean),
        "latency_seconds_p50": line(start.latency_seconds_p50, end.latency_seconds_p50),
        "latency_seconds_p99": line(start.latency_seconds_p99, end.latency_seconds_p99),
        "throughput_rps": 1.0 / line(1.0 / start.throughput_rps, 1.0 / end.throughput_rps),
        "batches": min(start.batches, end.batches),
    }
    return start.replace(**between)  # extrapolation may exceed the bounds of a document


def _with_row_seconds(measurement: Measurement, row_seconds: float) -> Measurement:
    seconds = measurement.batch_size * row_seconds
    slower = {
        "latency_seconds_mean": measurement.latency_seconds_mean + seconds,
        "latency_seconds_p50": measurement.latency_seconds_p50 + seconds,
        "latency_seconds_p99": measurement.latency_seconds_p99 + seconds,
        "throughput_rps": 1.0 / (1.0 / measurement.throughput_rps + row_seconds),
    }
    return measurement.replace(**slower)


def _linear(start: float, end: float, share: float) -> float:
    return start + share * (end - start)


class Hardware(Model):
    """Hardware on which the profile was measured."""

    processor: str
    accelerator: str | None = None
    node_cores: int = Field(ge=1)


class ModelIdentity(Model):
    """Identity of a variant when it was measured."""

    family: str = ""
    parameters: dict[str, ParameterValue] = Field(default_factory=dict)
    weights: str = ""
    """SHA-256 of local weights; else their URI."""
    code: str = Field(default="", exclude_if=is_empty)
    """SHA-256 of the package that holds a family of the user's own."""

    def describe_change(self, now: "ModelIdentity") -> str:
        """Short description of how the variant has changed since; empty if it has not."""
        if self.family != now.family:
            return f"family {self.family}, which is {now.family} now"
        if self.parameters != now.parameters:
            changed = {*self.parameters.items()} ^ {*now.parameters.items()}
            return f"other parameters ({', '.join(sorted({name for name, _ in changed}))})"
        if self.code and self.code != now.code:
            return "other code"
        return "" if self.weights == now.weights else "other weights"

    @property
    def digest(self) -> str:
        """SHA-256 of the identity."""
        return f"sha256:{hashlib.sha256(self.model_dump_json().encode()).hexdigest()}"


class ModelProfileSpec(Model):
    """Measurements of one stage of one pipeline on one kind of hardware."""

    pipeline: Name
    stage: Name
    hardware: Hardware
    points: tuple[PointProfile, ...] = Field(min_length=1, max_length=4096)
    models: dict[str, ModelIdentity] = Field(default_factory=dict)
    """Identity of each measured variant. Absent in older profiles."""
    memory: dict[str, MemoryProfile] = Field(default_factory=dict, exclude_if=is_empty)
    """Resident memory of a replica of each measured variant. Absent in older profiles, and of a user's containers."""
    base_allocation: dict[str, Cores] = Field(default_factory=dict)
    """Minimum cores with which each variant meets the stage's SLO and base load."""
    stage_slo_seconds: float | None = Field(default=None, gt=0)
    """Five times the mean latency at batch 1 (IPA, section 4.1)."""
    longest_batch_seconds: float | None = Field(default=None, gt=0, exclude_if=lambda seconds: seconds is None)
    """Latency limit while measuring. Larger batch sizes were skipped after a smaller one exceeded it; absent if none
    was.
    """
    busy_share: float | None = Field(default=None, ge=0, exclude_if=lambda share: share is None)
    """Share of the machine's cores that other processes used while the profile was measured."""
    inputs: Literal["Samples", "Payloads", "Drawn"] | None = Field(
        default=None, exclude_if=lambda inputs: inputs is None
    )
    """Rows that were measured: samples, payloads that the pipeline names, or rows drawn at random. Absent in older
    profiles.
    """

    def point(self, variant: str, operating_point: str, cores: float) -> PointProfile | None:
        for point in self.points:
            if (point.variant, point.operating_point) == (variant, operating_point) and abs(point.cores - cores) < 1e-6:
                return point
        return None


class ModelProfile(Resource):
    """ModelProfile holds the measured latency and throughput of a stage's operating points."""

    kind: Literal["ModelProfile"] = "ModelProfile"
    spec: ModelProfileSpec


def profiles_by_stage(profiles: Iterable[ModelProfile]) -> dict[str, ModelProfile]:
    """Merge profiles by stage: points measured on several kinds of hardware, CPU and GPU, are combined.

    A point present twice, and all fields of the stage, are taken from the later profile.
    """
    merged: dict[str, ModelProfile] = {}
    for profile in profiles:
        earlier = merged.get(profile.spec.stage)
        merged[profile.spec.stage] = profile if earlier is None else _merge(earlier, profile)
    return merged


def memory_by_stage(profiles: Mapping[str, ModelProfile]) -> dict[str, MemoryProfiles]:
    return {stage: profile.spec.memory for stage, profile in profiles.items()}


def _merge(earlier: ModelProfile, later: ModelProfile) -> ModelProfile:
    points = {(p.variant, p.operating_point, p.cores): p for p in (*earlier.spec.points, *later.spec.points)}
    merged = {
        "points": tuple(points.values()),
        "models": earlier.spec.models | later.spec.models,
        "memory": earlier.spec.memory | later.spec.memory,
        "base_allocation": earlier.spec.base_allocation | later.spec.base_allocation,
    }
    return later.with_spec(**merged)
