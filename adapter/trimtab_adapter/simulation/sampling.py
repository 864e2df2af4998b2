"""Random sampling of service times and fan-outs. One seed gives one result."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.planning.planning_problem import PlanningError
from trimtab_adapter.simulation.environment import Environment
from trimtab_pipelines.profile import ChatProfile, ModelProfile, PointProfile
from trimtab_pipelines.stages import Stage
from trimtab_protocol.chat.internal_wire import Usage

_P99_DEVIATIONS = 2.3263
"""Of a normal distribution; its 99 % quantile."""
_BLOCK = 8192


class ServiceTimeSampler:
    """Seconds of a stage's batches: log-normal by the profile's median and p99, as measured, or the median.

    Between profiled batch sizes it interpolates linearly, since the router sends batches of any size.
    """

    def __init__(
        self, stage: Stage, profile: ModelProfile, environment: Environment, random: np.random.Generator
    ) -> None:
        self._stage, self._profile, self._environment = stage, profile, environment
        self._random = random
        self._normals: list[float] = []
        self._factors: dict[str, list[float]] = {}
        self._distributions: dict[tuple[str, str, int], tuple[float, float]] = {}

    def draw(self, variant: str, point: str, rows: int) -> float:
        law = self._distributions.get((variant, point, rows))
        if law is None:
            law = self._distributions[variant, point, rows] = self._distribution(variant, point, rows)
        median, deviation = law
        if not deviation:
            return median * self._measured_factor(variant)
        if not self._normals:
            self._normals = self._random.standard_normal(_BLOCK).tolist()
        return median * math.exp(deviation * self._normals.pop())

    def draw_chat(
        self, variant: str, point: str, concurrent_rows: int, images: int, text_tokens: int = 0
    ) -> "ChatSample":
        """The times and tokens of one of `concurrent_rows` generations; 0 text tokens stand for the profiled prompt."""
        profile = self._point_profile(variant, point).for_chats(images)
        begun, tokens = profile.to_first_token, 1.0 if profile.chats is None else profile.chats.tokens
        own = self._measured_factor(variant) * self._environment.service_ratios.get((self._stage.name, variant), 1.0)
        deviation = _deviation(begun, concurrent_rows) * self._environment.spread
        drawn = own * math.exp(deviation * float(self._random.standard_normal()))
        first = interpolate_latency(begun, concurrent_rows, 0.5)
        whole = max(interpolate_latency(profile, concurrent_rows, 0.5), first)
        seconds, usage = _prefill_cost(self._point_profile(variant, point).chats, images, text_tokens)
        return ChatSample(drawn * (first + seconds), drawn * (whole + seconds), tokens, usage)

    def _point_profile(self, variant: str, point: str) -> PointProfile:
        found = self._profile.spec.point(variant, point, self._stage.variant(variant).resources.cpu)
        if found is None:
            raise PlanningError(f"stage {self._stage.name}: variant {variant} was not profiled with its cores")
        return found

    def _measured_factor(self, variant: str) -> float:
        """A measured factor on the expected time; 1 without measurements."""
        drawn = self._factors.get(variant)
        if not drawn:
            known = self._environment.factors.get((self._stage.name, variant)) or (1.0,)
            drawn = self._factors[variant] = self._random.choice(known, _BLOCK).tolist()
        return drawn.pop()

    def _distribution(self, variant: str, point: str, rows: int) -> tuple[float, float]:
        found = self._point_profile(variant, point)
        environment, key = self._environment, (self._stage.name, variant)
        median = interpolate_latency(found, rows, 0.5) * environment.service_ratios.get(key, 1.0)
        if sizes := environment.size_ratios.get(key):
            median *= float(interpolate_sizes(sizes, [rows])[0])
        return median, 0.0 if key in environment.factors else _deviation(found, rows) * environment.spread


@dataclass(frozen=True, slots=True)
class ChatSample:
    """Time to first token, total time and tokens of a generation, and its prompt's usage."""

    first_seconds: float
    whole_seconds: float
    tokens: float
    usage: Usage


def _prefill_cost(chats: ChatProfile | None, images: int, text_tokens: int) -> tuple[float, Usage]:
    """Seconds beyond the profiled prompt, and the tokens of a prompt with this much text besides its images."""
    if chats is None or not text_tokens:
        return 0.0, Usage()
    shown = round(images * (chats.mean_prompt_tokens(1.0) - chats.mean_prompt_tokens(0.0)))
    usage = Usage(prompt=text_tokens + shown, image=shown, text=text_tokens)
    return chats.extra_prefill_seconds(usage.prompt, images), usage


def interpolate_sizes(known: Mapping[int, float], rows: Sequence[int] | NDArray[np.int32]) -> NDArray[np.float64]:
    """Interpolate values of some batch sizes linearly; beyond them the nearest value."""
    sizes = sorted(known)
    return np.interp(rows, sizes, [known[size] for size in sizes])


def _deviation(profile: PointProfile, rows: int) -> float:
    """The standard deviation of the logarithm of a batch's seconds, by the profile's median and p99."""
    median, high = (interpolate_latency(profile, rows, quantile) for quantile in (0.5, 0.99))
    return math.log(max(high / median, 1.0)) / _P99_DEVIATIONS


def interpolate_latency(profile: PointProfile, rows: int, quantile: float) -> float:
    """A latency quantile of a batch, interpolated linearly between the profiled sizes."""
    sizes = sorted(measurement.batch_size for measurement in profile.measurements)
    below = max((size for size in sizes if size <= rows), default=None)
    above = min((size for size in sizes if size >= rows), default=None)
    if below is None or above is None or below == above:
        return profile.latency_seconds(rows, quantile)
    low, high = profile.latency_seconds(below, quantile), profile.latency_seconds(above, quantile)
    return low + (high - low) * (rows - below) / (above - below)


class Uniform:
    """Numbers from 0 to 1."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._drawn, self._next = random.random(0), 0

    def draw(self, count: int) -> NDArray[np.float64]:
        """Draw numbers; must not be modified."""
        begin, self._next = self._next, self._next + count
        if self._next > self._drawn.size:
            drawn = self._random.random(max(_BLOCK, count))
            self._drawn, begin, self._next = np.concatenate([self._drawn[begin:], drawn]), 0, count
        return self._drawn[begin : self._next]


class FanOut:
    """Rows of a counted output per input row."""

    def __init__(self, weights: tuple[float, ...], random: np.random.Generator) -> None:
        shares = np.asarray(weights) / sum(weights)
        self._draws = cycle(random.choice(len(weights), size=_BLOCK, p=shares).tolist())

    def draw(self, rows: int) -> list[int]:
        """Draw the number of rows for each input row."""
        return list(islice(self._draws, rows))


def fan_outs(stage: Stage, environment: Environment, random: np.random.Generator) -> Mapping[str, FanOut]:
    """The fan-out of each counted output of a stage, by the name of its count; outputs with the same count agree."""
    found: dict[str, FanOut] = {}
    for output in stage.outputs:
        if output.counted_by is not None and output.counted_by not in found:
            weights = environment.fan_out.get((stage.name, output.counted_by)) or rounding_weights(output.expected_rows)
            found[output.counted_by] = FanOut(weights, random)
    return found


def rounding_weights(mean: float) -> tuple[float, ...]:
    """The probabilities of 0, 1, 2 … that put all weight on the integers around a mean."""
    below = math.floor(mean)
    return (*([0.0] * below), 1.0 - (mean - below), mean - below)
