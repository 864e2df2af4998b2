"""How fast it is: measured latency and throughput of each operating point, by batch size and cores.

The fit is IPA's latency law l(b) = α b² + β b + γ (section 4.1). Measured batch sizes answer for themselves; the fit
answers only in between and beyond, and promises no more there than the sizes beside it showed.
"""

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Literal, Self

from pydantic import Field, model_validator

from trimtab_pipelines.prefill_time import prefill_seconds
from trimtab_pipelines.quantity import Cores
from trimtab_pipelines.resource import Model, Name, Resource, is_empty
from trimtab_pipelines.variants import ParameterValue


class Measurement(Model):
    """One batch size at saturation, every batch full."""

    batch_size: int = Field(ge=1)
    latency_seconds_mean: float = Field(gt=0)
    latency_seconds_p50: float = Field(gt=0)
    latency_seconds_p99: float = Field(gt=0)
    throughput_rps: float = Field(gt=0, description="Rows per second of one replica")
    batches: int = Field(ge=1, description="Batches measured")


class LatencyFit(Model):
    """l(b) = quadratic·b² + linear·b + constant, in seconds."""

    quadratic: float
    linear: float
    constant: float
    mean_relative_error: float = Field(ge=0, description="Mean of |fit − measured| / measured")

    def seconds(self, batch_size: float) -> float:
        """Evaluate the law at a batch size."""
        return (self.quadratic * batch_size + self.linear) * batch_size + self.constant

    def max_seconds(self, least: float, most: float) -> float:
        """The greatest value of the law between two batch sizes: at either, or where a falling parabola turns."""
        tops = [self.seconds(least), self.seconds(most)]
        if self.quadratic < 0 and least < (turn := -self.linear / (2.0 * self.quadratic)) < most:
            tops.append(self.seconds(turn))
        return max(tops)


class LatencyCurve(Model):
    """What was measured by batch size, and the law fitted to it."""

    measurements: tuple[Measurement, ...] = Field(min_length=1, max_length=64)
    fit: LatencyFit

    def interpolate(self, other: "LatencyCurve", share: float) -> "LatencyCurve":
        """On the straight line to another, of the batch sizes that both have: 0 is this one, 1 the other.

        Seconds a row are what lies on the line, also of throughput. Beyond the other it goes on, but never below the
        lesser of both.
        """
        pairs = {one.batch_size: one for one in other.measurements}
        known = [(one, pairs[one.batch_size]) for one in self.measurements if one.batch_size in pairs]
        return LatencyCurve(
            measurements=tuple(_interpolate(one, to, share) for one, to in known),
            fit=LatencyFit(
                quadratic=_linear(self.fit.quadratic, other.fit.quadratic, share),
                linear=_linear(self.fit.linear, other.fit.linear, share),
                constant=_linear(self.fit.constant, other.fit.constant, share),
                mean_relative_error=max(self.fit.mean_relative_error, other.fit.mean_relative_error),
            ),
        )

    def with_row_seconds(self, row_seconds: float) -> "LatencyCurve":
        """Each row of a batch takes so much longer."""
        return LatencyCurve(
            measurements=tuple(_with_row_seconds(one, row_seconds) for one in self.measurements),
            fit=self.fit.model_copy(update={"linear": self.fit.linear + row_seconds}),
        )


class ChatProfile(Model):
    """Of what writes: beside whole answers to chats with an image, what else its times depend on."""

    time_to_first_token: LatencyCurve = Field(description="Until the first piece of the answer")
    text_only: LatencyCurve = Field(description="Of chats without images, the whole answer")
    text_only_time_to_first_token: LatencyCurve = Field(description="Of chats without images, until its first piece")
    tokens: float = Field(ge=1, description="Of a whole answer, on average")
    prompt_tokens: float = Field(
        default=0.0,
        ge=0,
        exclude_if=lambda tokens: not tokens,
        description="Of the prompts that show an image, on average; images count where they join the prompt",
    )
    text_prompt_tokens: float = Field(
        default=0.0,
        ge=0,
        exclude_if=lambda tokens: not tokens,
        description="Of the prompts that show none, on average",
    )
    prefill_seconds: dict[int, float] = Field(
        default_factory=dict,
        max_length=32,
        exclude_if=is_empty,
        description="Median seconds until the answer to a prompt of words alone begins, by its tokens; one at a time",
    )

    def mean_prompt_tokens(self, images: float) -> float:
        """Of the prompts that times are of, where each shows so many images; 0 where an older profile does not say."""
        return _linear(self.text_prompt_tokens, self.prompt_tokens, images) if self.prefill_seconds else 0.0

    def extra_prefill_seconds(self, tokens: float, images: float) -> float:
        """What a prompt of so many tokens takes beyond the one that was measured with so many images; none if fewer."""
        usual = self.mean_prompt_tokens(images)
        if not tokens > usual:
            return 0.0
        longer, known = (prefill_seconds(self.prefill_seconds, each) for each in (tokens, usual))
        return max(longer - known, 0.0)


class PointProfile(Model):
    """One operating point of one variant with one allocation of cores."""

    variant: Name
    operating_point: Name = "default"
    cores: Cores = Field(gt=0)
    measurements: tuple[Measurement, ...] = Field(min_length=1, max_length=64)
    fit: LatencyFit
    chats: ChatProfile | None = Field(
        default=None, exclude_if=lambda chats: chats is None, description="Of a stage that writes answers to chats"
    )

    def for_chats(self, images: float, prompt_tokens: float = 0.0) -> "PointProfile":
        """The same for chats as they are: measured with no image and with one, a line through both.

        Args:
            images: that each shows on average.
            prompt_tokens: of each on average. Those beyond the measured ones cost what reading them takes, of each chat
                that is beside; fewer are as dear as measured.
        """
        if self.chats is None:
            return self
        own = self.chats.text_only.interpolate(LatencyCurve(measurements=self.measurements, fit=self.fit), images)
        first = self.chats.text_only_time_to_first_token.interpolate(self.chats.time_to_first_token, images)
        beyond = self.chats.extra_prefill_seconds(prompt_tokens, images)
        if beyond:
            own, first = own.with_row_seconds(beyond), first.with_row_seconds(beyond)
        return self._with_curve(own, self.chats.model_copy(update={"time_to_first_token": first}))

    @property
    def to_first_token(self) -> "PointProfile":
        """The same with times that end with the first piece of an answer, where answers are written."""
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

    def latency_seconds(self, batch_size: int, quantile: float = 0.99) -> float:
        """The service time of a full batch: p99 for quantiles above 0.9, else the median.

        A batch size not measured takes the fit, scaled by the nearest measurement's ratio of quantile to mean and held
        between the sizes beside it; beyond the largest it is never below that one's.
        """
        field = "latency_seconds_p99" if quantile > 0.9 else "latency_seconds_p50"
        measured = self._by_batch.get(batch_size)
        if measured is not None:
            return float(getattr(measured, field))
        nearest = min(self.measurements, key=lambda m: abs(m.batch_size - batch_size))
        ratio = float(getattr(nearest, field)) / nearest.latency_seconds_mean
        return self._clamp(self._mean_seconds(batch_size) * ratio, batch_size, field)

    def throughput_rps(self, batch_size: int) -> float:
        """Rows per second of one replica that always has full batches of this size.

        A batch size not measured has no more than the better of the sizes beside it, nor beyond them than the best.
        """
        measured = self._by_batch.get(batch_size)
        if measured is not None:
            return measured.throughput_rps
        return min(batch_size / self._mean_seconds(batch_size), self._max_rps(batch_size))

    def _mean_seconds(self, batch_size: int) -> float:
        """What a batch size that was not measured takes on average: the fit, as far as the sizes beside it allow.

        The fit counts by its greatest value since the size below: seconds that fall again would be a law turned over.
        """
        below, _ = self._neighbours(batch_size)
        fitted = self.fit.max_seconds(batch_size if below is None else below.batch_size, batch_size)
        fitted = max(fitted, batch_size / self._max_rps(batch_size))
        return self._clamp(fitted, batch_size, "latency_seconds_mean")

    def _clamp(self, seconds: float, batch_size: int, field: str) -> float:
        """Seconds between what the sizes beside it took; beyond the largest no less than that one, however many."""
        below, above = self._neighbours(batch_size)
        one = 0.0 if below is None else float(getattr(below, field))
        other = math.inf if above is None else float(getattr(above, field))
        return min(max(seconds, min(one, other)), max(one, other))

    def _max_rps(self, batch_size: int) -> float:
        """Of a batch size that was not measured: what those beside it showed; where one is missing, any of them."""
        below, above = self._neighbours(batch_size)
        known = self.measurements if below is None or above is None else (below, above)
        return max(measurement.throughput_rps for measurement in known)

    def _neighbours(self, batch_size: int) -> tuple[Measurement | None, Measurement | None]:
        """The measurements of the next smaller and the next larger batch size; None where there is none."""
        smaller = (m for m in self.measurements if m.batch_size < batch_size)
        larger = (m for m in self.measurements if m.batch_size > batch_size)
        return (
            max(smaller, key=lambda m: m.batch_size, default=None),
            min(larger, key=lambda m: m.batch_size, default=None),
        )

    @model_validator(mode="after")
    def _unique_batches(self) -> Self:
        if len(self._by_batch) != len(self.measurements):
            raise ValueError(f"profile of {self.variant}: a batchSize stands twice in measurements")
        return self


def _interpolate(one: Measurement, to: Measurement, share: float) -> Measurement:
    def line(before: float, after: float) -> float:
        return max(_linear(before, after, share), min(before, after))

    return Measurement(
        batch_size=one.batch_size,
        latency_seconds_mean=line(one.latency_seconds_mean, to.latency_seconds_mean),
        latency_seconds_p50=line(one.latency_seconds_p50, to.latency_seconds_p50),
        latency_seconds_p99=line(one.latency_seconds_p99, to.latency_seconds_p99),
        throughput_rps=1.0 / line(1.0 / one.throughput_rps, 1.0 / to.throughput_rps),
        batches=min(one.batches, to.batches),
    )


def _with_row_seconds(one: Measurement, row_seconds: float) -> Measurement:
    seconds = one.batch_size * row_seconds
    return Measurement(
        batch_size=one.batch_size,
        latency_seconds_mean=one.latency_seconds_mean + seconds,
        latency_seconds_p50=one.latency_seconds_p50 + seconds,
        latency_seconds_p99=one.latency_seconds_p99 + seconds,
        throughput_rps=1.0 / (1.0 / one.throughput_rps + row_seconds),
        batches=one.batches,
    )


def _linear(one: float, to: float, share: float) -> float:
    return one + share * (to - one)


class Hardware(Model):
    """What it was measured on."""

    processor: str
    accelerator: str | None = None
    node_cores: int = Field(ge=1)


class ModelIdentity(Model):
    """A variant as it was when it was measured."""

    family: str = ""
    parameters: dict[str, ParameterValue] = Field(default_factory=dict)
    weights: str = Field(default="", description="SHA-256 of files on the machine; else the address they came from")

    def describe_change(self, now: "ModelIdentity") -> str:
        """Say in a few words what the variant has become since; empty where it is the same."""
        if self.family != now.family:
            return f"family {self.family}, which is {now.family} now"
        if self.parameters != now.parameters:
            changed = {*self.parameters.items()} ^ {*now.parameters.items()}
            return f"other parameters ({', '.join(sorted({name for name, _ in changed}))})"
        return "" if self.weights == now.weights else "other weights"


class ModelProfileSpec(Model):
    """All that was measured for one stage of one pipeline on one kind of hardware."""

    pipeline: Name
    stage: Name
    hardware: Hardware
    points: tuple[PointProfile, ...] = Field(min_length=1, max_length=4096)
    models: dict[str, ModelIdentity] = Field(
        default_factory=dict, description="What was measured, by variant; older profiles do not say"
    )
    base_allocation: dict[str, Cores] = Field(
        default_factory=dict, description="Least cores at which each variant meets the stage's SLO and base load"
    )
    stage_slo_seconds: float | None = Field(
        default=None, gt=0, description="Five times the mean latency at batch 1 (IPA, section 4.1)"
    )
    longest_batch_seconds: float | None = Field(
        default=None,
        gt=0,
        exclude_if=lambda seconds: seconds is None,
        description="Batch sizes were left out since a smaller one took longer than this; absent where none was",
    )

    def point(self, variant: str, operating_point: str, cores: float) -> PointProfile | None:
        """What was measured for this allocation of cores, or None."""
        for point in self.points:
            if (point.variant, point.operating_point) == (variant, operating_point) and abs(point.cores - cores) < 1e-6:
                return point
        return None


class ModelProfile(Resource):
    """A profile as the profiler writes it."""

    kind: Literal["ModelProfile"] = "ModelProfile"
    spec: ModelProfileSpec


def profiles_by_stage(profiles: Iterable[ModelProfile]) -> dict[str, ModelProfile]:
    """One profile a stage: the points measured on several kinds of hardware, CPU and GPU, stand together.

    A variant asks for one kind, so no point is there twice; if it is, the later profile's counts, as
    does what else the later one says of the stage.
    """
    found: dict[str, ModelProfile] = {}
    for profile in profiles:
        before = found.get(profile.spec.stage)
        found[profile.spec.stage] = profile if before is None else _merge(before, profile)
    return found


def _merge(one: ModelProfile, other: ModelProfile) -> ModelProfile:
    points = {(p.variant, p.operating_point, p.cores): p for p in (*one.spec.points, *other.spec.points)}
    together = {
        "points": tuple(points.values()),
        "models": one.spec.models | other.spec.models,
        "base_allocation": one.spec.base_allocation | other.spec.base_allocation,
    }
    return other.model_copy(update={"spec": other.spec.model_copy(update=together)})
