"""Results of a run: one record per request with its outcome, and figures over all records.

Latencies count from the scheduled arrival, so that a stalled server or client cannot hide the requests that would have
been sent meanwhile (coordinated omission). Every scheduled request has a record and one outcome.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hdrh.histogram import HdrHistogram
from numpy.typing import NDArray

from trimtab_pipelines.request_outcome import RequestOutcome

OK_CODES = frozenset({"200", "OK"})
DROPPED_CODES = frozenset({"504", "DEADLINE_EXCEEDED"})
REFUSED_CODES = frozenset({"429", "503", "RESOURCE_EXHAUSTED", "UNAVAILABLE"})
RECORDS_FILE, SUMMARY_FILE = "requests.npz", "load.json"
SATURATED_LATENESS_SECONDS = 0.05
_HIGHEST_MICROSECONDS = 3600 * 10**6
_SIGNIFICANT_DIGITS = 3
_QUANTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class ClientTimings:
    """Timings of a response, or their SLOs, in seconds; an unknown timing is NaN, a missing SLO infinite."""

    latency_seconds: float
    """Time from the scheduled arrival to the end of the response."""
    first_token_seconds: float = float("nan")
    """Time from the scheduled arrival to the first event."""
    between_tokens_seconds: float = float("nan")
    """Mean time between two events. An event may hold several tokens, which makes this stricter than time per token."""

    def meets(self, slos: "ClientTimings") -> bool:
        """Whether each known timing is within its SLO; a streamed response must also meet those of its tokens."""
        return not (
            self.latency_seconds > slos.latency_seconds
            or self.first_token_seconds > slos.first_token_seconds
            or self.between_tokens_seconds > slos.between_tokens_seconds
        )


def classify(code: str, timings: ClientTimings, slos: ClientTimings) -> RequestOutcome:
    """Classify an HTTP status, a gRPC status name or the name of a client error."""
    if code in OK_CODES:
        return RequestOutcome.OK if timings.meets(slos) else RequestOutcome.LATE
    if code in DROPPED_CODES:
        return RequestOutcome.DROPPED
    return RequestOutcome.REFUSED if code in REFUSED_CODES else RequestOutcome.FAILED


class StageVisit(NamedTuple):
    """Stage parameters of a response, of its slowest batch; times in seconds."""

    variant: str = ""
    batch_size: int = 0
    queue_seconds: float = float("nan")
    service_seconds: float = float("nan")
    operating_point: str = ""


_COLUMNS = {
    "scheduled": "f8",
    "sent": "f8",
    "latency_seconds": "f8",
    "outcome": "u1",
    "correct": "i4",
    "total": "i4",
    "expected_accuracy": "f8",
    "floor": "f8",
    "escalation_pending": "i4",
    "escalation_pending_correct": "i4",
    "code": "U24",
    "detail": "U120",
    "drop_stage": "U63",
    "drop_reason": "U40",
}
TOKEN_TIMES = ("first_token_seconds", "between_tokens_seconds")
_STREAM_COLUMNS = {**dict.fromkeys(TOKEN_TIMES, "f8"), "images": "i4"}
"""Columns of streamed loads only."""
MODALITIES = ("text", "image")
_VISIT_COLUMNS = {
    "variant": "U63",
    "batch_size": "i4",
    "queue_seconds": "f8",
    "service_seconds": "f8",
    "operating_point": "U63",
}


class Record(NamedTuple):
    """One request; times in seconds from the start of the run."""

    scheduled: float
    sent: float
    latency_seconds: float
    outcome: RequestOutcome
    code: str
    detail: str = ""
    """Error message of the server or the client."""
    correct: int = 0
    total: int = 0
    expected_accuracy: float = float("nan")
    """Accuracy that the plan expects; NaN if unknown."""
    floor: float = float("nan")
    """Accuracy floor of the request; NaN if it has none."""
    escalation_pending: int = 0
    """Rows whose response precedes their escalation."""
    escalation_pending_correct: int = 0
    """Correct rows among these."""
    drop_stage: str = ""
    drop_reason: str = ""
    visits: Mapping[str, StageVisit] = {}
    """Visits by stage."""
    first_token_seconds: float = float("nan")
    """Time from the scheduled arrival to the first event of a streamed response; NaN without one."""
    between_tokens_seconds: float = float("nan")
    """Mean time between two events of a streamed response; NaN for fewer than two."""
    images: int = 0


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Parameters of a run."""

    pipeline: str
    load: str
    duration_seconds: float
    """Period in which requests are scheduled."""
    slo_seconds: float
    stages: tuple[str, ...]
    started_at: float
    """Unix time of second 0."""
    gap_seconds: int = 0
    """Seconds of a trace without a count."""
    distinct_payloads: int = 0
    interrupted: bool = False
    """The run stopped before its end; `duration_seconds` is the actual duration."""
    streamed: bool = False
    first_token_slo_seconds: float | None = None
    between_tokens_slo_seconds: float | None = None

    @property
    def slo(self) -> ClientTimings:
        first, between = self.first_token_slo_seconds, self.between_tokens_slo_seconds
        return ClientTimings(
            self.slo_seconds, math.inf if first is None else first, math.inf if between is None else between
        )


@dataclass(frozen=True, slots=True)
class ModalityResults:
    """Results of the chats with images, or of the chats without."""

    received: int
    answered: int
    """Number of chats with a response, ok or late."""
    slo_fraction: float
    """Fraction of the chats sent that meet their SLOs."""
    tokens: Mapping[str, float]
    """Percentiles in seconds by name, such as `first_token_seconds_p50`; empty without a response."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Times of one stage in seconds, and its mean batch size in rows, as responses report them."""

    queue_p50: float
    queue_p99: float
    service_p50: float
    service_p99: float
    mean_batch_size: float


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """All records of a run, in order of schedule.

    `records` is a structured array with the fields of `Record`. The fields `variant:STAGE`, `batch_size:STAGE`,
    `queue_seconds:STAGE`, `service_seconds:STAGE` and `operating_point:STAGE` replace `visits`; streamed loads have
    token times and images too.
    """

    facts: RunFacts
    records: NDArray[Any] = field(repr=False)

    @classmethod
    def of(cls, facts: RunFacts, records: Sequence[Record]) -> "Results":
        array = np.zeros(len(records), dtype=_dtype(facts))
        for column in (*_COLUMNS, *(_STREAM_COLUMNS if facts.streamed else ())):
            array[column] = [getattr(record, column) for record in records]
        for stage in facts.stages:
            visits = [record.visits.get(stage, StageVisit()) for record in records]
            for column in _VISIT_COLUMNS:
                array[f"{column}:{stage}"] = [getattr(visit, column) for visit in visits]
        return cls(facts, array[np.argsort(array["scheduled"], kind="stable")])

    def count(self, outcome: RequestOutcome) -> int:
        return int((self.records["outcome"] == outcome).sum())

    @property
    def answered(self) -> NDArray[Any]:
        answered: NDArray[Any] = self.records[self.records["outcome"] <= RequestOutcome.LATE]
        return answered

    def latency_percentiles(self) -> dict[str, float]:
        """HDR percentiles, in seconds, of the latency of all responses; empty without any."""
        return percentiles(self.answered["latency_seconds"])

    def modalities(self) -> dict[str, ModalityResults]:
        """Results of chats without images (`text`) and with images (`image`), if any; empty if not streamed."""
        results: dict[str, ModalityResults] = {}
        for name, has_images in zip(MODALITIES, (False, True), strict=True) if self.facts.streamed else ():
            records = self.records[(self.records["images"] > 0) == has_images]
            if records.size:
                slo_fraction = float((records["outcome"] == RequestOutcome.OK).mean())
                answered = records[records["outcome"] <= RequestOutcome.LATE]
                tokens = _token_percentiles(answered)
                results[name] = ModalityResults(records.size, answered.size, slo_fraction, tokens)
        return results

    def stage_times(self, stage: str) -> StageTimes | None:
        """Times of a stage over all responses; None if no response reports them."""
        visited = self.answered[~np.isnan(self.answered[f"service_seconds:{stage}"])]
        if not visited.size:
            return None
        queue_p50, queue_p99 = np.quantile(visited[f"queue_seconds:{stage}"], (0.5, 0.99)).tolist()
        service_p50, service_p99 = np.quantile(visited[f"service_seconds:{stage}"], (0.5, 0.99)).tolist()
        batch_size = float(visited[f"batch_size:{stage}"].mean())
        return StageTimes(queue_p50, queue_p99, service_p50, service_p99, batch_size)

    def idle_stages(self) -> list[str]:
        """Stages that served no rows of any response; empty if responses name no stages."""
        idle = [stage for stage in self.facts.stages if not self.answered[f"batch_size:{stage}"].any()]
        return [] if len(idle) == len(self.facts.stages) else idle

    def failures(self) -> dict[str, int]:
        """Number of failed requests by reason."""
        failed = self.records[self.records["outcome"] == RequestOutcome.FAILED]
        return _counts(np.where(failed["detail"] == "", failed["code"], failed["detail"]))

    def summary(self) -> dict[str, Any]:
        """Figures of the run, with units in their names; a figure without measurements is None."""
        received, answered, facts = len(self.records), self.answered, self.facts
        lateness = percentiles(np.maximum(self.records["sent"] - self.records["scheduled"], 0.0)).get("p99", 0.0)
        within_slo = self.count(RequestOutcome.OK)
        return {
            "received": received,
            **{outcome.word: self.count(outcome) for outcome in RequestOutcome},
            "slo_fraction": within_slo / received if received else None,
            "slo_seconds": facts.slo_seconds,
            **{f"latency_seconds_{name}": value for name, value in self.latency_percentiles().items()},
            **(_token_percentiles(answered) if facts.streamed else {}),
            **_by_modality(self.modalities()),
            "measured_accuracy": _ratio(answered["correct"].sum(), answered["total"].sum()),
            "expected_accuracy": _mean(answered["expected_accuracy"]),
            "offered_rps": received / facts.duration_seconds,
            "answered_rps": len(answered) / facts.duration_seconds,
            "goodput_rps": within_slo / facts.duration_seconds,
            "client_lateness_seconds_p99": lateness,
            "client_saturated": bool(lateness > SATURATED_LATENESS_SECONDS),
            "codes": _counts(self.records["code"]),
            "drops": _counts(self._drops()),
            "failures": self.failures(),
            "gap_seconds": facts.gap_seconds,
            "distinct_payloads": facts.distinct_payloads,
            "interrupted": facts.interrupted,
        }

    def save(self, folder: Path) -> None:
        """Write requests.npz (all records) and load.json (facts and summary) into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(folder / RECORDS_FILE, allow_pickle=False, records=self.records)
        facts = {name: getattr(self.facts, name) for name in RunFacts.__dataclass_fields__}
        text = json.dumps({"facts": facts, "summary": self.summary()}, indent=1)
        (folder / SUMMARY_FILE).write_text(text + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Results":
        """Read a folder written by `save`; raises ValueError if a file is not of a run."""
        try:
            written = json.loads((folder / SUMMARY_FILE).read_text())["facts"]
            facts = RunFacts(**{**written, "stages": tuple(written["stages"])})
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{folder / SUMMARY_FILE} is not the summary of a load: {error!r}") from error
        with np.load(folder / RECORDS_FILE, allow_pickle=False) as arrays:
            records = arrays["records"]
        if records.dtype != _dtype(facts):
            raise ValueError(f"{folder / RECORDS_FILE} does not have the fields that {SUMMARY_FILE} implies")
        return cls(facts, records)

    def _drops(self) -> NDArray[Any]:
        dropped = self.records[self.records["outcome"] == RequestOutcome.DROPPED]
        labels = np.char.add(np.char.add(dropped["drop_stage"], "/"), dropped["drop_reason"])
        return np.where(labels == "/", "unknown", labels)


def percentiles(latencies_seconds: NDArray[np.float64]) -> dict[str, float]:
    """HDR percentiles p50, p90, p99 and p99.9, in seconds, to three significant digits; empty for no values."""
    if not latencies_seconds.size:
        return {}
    histogram = HdrHistogram(1, _HIGHEST_MICROSECONDS, _SIGNIFICANT_DIGITS)
    microseconds = np.clip(np.rint(latencies_seconds * 1e6), 1, _HIGHEST_MICROSECONDS).astype(np.int64)
    for value, count in zip(*np.unique(microseconds, return_counts=True), strict=True):
        histogram.record_value(int(value), int(count))
    return {f"p{quantile:g}": histogram.get_value_at_percentile(quantile) / 1e6 for quantile in _QUANTILES}


def _token_percentiles(answered: NDArray[Any]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for column in TOKEN_TIMES:
        seconds = answered[column]
        figures |= {f"{column}_{name}": value for name, value in percentiles(seconds[~np.isnan(seconds)]).items()}
    return figures


def _by_modality(modalities: Mapping[str, ModalityResults]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, results in modalities.items():
        figures |= {f"{name}_received": results.received, f"{name}_slo_fraction": results.slo_fraction}
        figures |= {f"{name}_{figure}": seconds for figure, seconds in results.tokens.items()}
    return figures


def _dtype(facts: RunFacts) -> np.dtype[Any]:
    visits = [(f"{column}:{stage}", kind) for stage in facts.stages for column, kind in _VISIT_COLUMNS.items()]
    streams = _STREAM_COLUMNS.items() if facts.streamed else ()
    return np.dtype([*_COLUMNS.items(), *visits, *streams])


def _ratio(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole else None


def _mean(values: NDArray[np.float64]) -> float | None:
    finite = values[~np.isnan(values)]
    return float(finite.mean()) if finite.size else None


def _counts(values: NDArray[Any]) -> dict[str, int]:
    return {str(value): int(count) for value, count in zip(*np.unique(values, return_counts=True), strict=True)}
