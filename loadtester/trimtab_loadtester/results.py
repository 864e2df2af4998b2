"""Results of a run: one record per request, and figures over all records.

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

from trimtab_loadtester.outcome import ClientTimings
from trimtab_pipelines.request_outcome import RequestOutcome

RECORDS_FILE, SUMMARY_FILE = "requests.npz", "load.json"
SATURATED_LATENESS_SECONDS = 0.05
_HIGHEST_MICROSECONDS = 3600 * 10**6
_SIGNIFICANT_DIGITS = 3
_QUANTILES = (50.0, 90.0, 99.0, 99.9)
_TEXT_LENGTHS = {"code": 24, "detail": 120, "drop_stage": 63, "drop_reason": 40}


class StageVisit(NamedTuple):
    """What the answer says of a stage that served it; of several batches the slowest. Times in seconds."""

    variant: str = ""
    batch_size: int = 0
    queue_seconds: float = float("nan")
    service_seconds: float = float("nan")
    operating_point: str = ""


_NUMBERS = {
    "scheduled": "f8",
    "sent": "f8",
    "latency_seconds": "f8",
    "outcome": "u1",
    "correct": "i4",
    "total": "i4",
    "expected_accuracy": "f8",
    "floor": "f8",
    "provisional": "i4",
    "provisional_correct": "i4",
}
TOKEN_TIMES = ("first_token_seconds", "between_tokens_seconds")
_STREAM_COLUMNS = {**dict.fromkeys(TOKEN_TIMES, "f8"), "images": "i4"}
"""Of loads that are streamed, alone."""
MODALITIES = ("text", "image")
_VISIT_COLUMNS = {
    "variant": "U63",
    "batch_size": "i4",
    "queue_seconds": "f8",
    "service_seconds": "f8",
    "operating_point": "U63",
}


class Record(NamedTuple):
    """One request; times in seconds from the start of the run.

    `detail` is the server's message where it refused, `expected_accuracy` what the plan that served it promised (NaN
    where unknown), `floor` the accuracy it asked for (NaN where none), `provisional` how many of its rows have an
    answer from before their second look and `provisional_correct` how many of these are right, `visits` how each stage
    served it. Of a streamed answer `first_token_seconds` counts from the scheduled arrival, and
    `between_tokens_seconds` is the mean between two pieces; NaN where there is none. `images` are those of a chat.
    """

    scheduled: float
    sent: float
    latency_seconds: float
    outcome: RequestOutcome
    code: str
    detail: str = ""
    correct: int = 0
    total: int = 0
    expected_accuracy: float = float("nan")
    floor: float = float("nan")
    provisional: int = 0
    provisional_correct: int = 0
    drop_stage: str = ""
    drop_reason: str = ""
    visits: Mapping[str, StageVisit] = {}
    first_token_seconds: float = float("nan")
    between_tokens_seconds: float = float("nan")
    images: int = 0


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Parameters of a run.

    Attributes:
        pipeline: the pipeline's name.
        load: the load as written.
        duration_seconds: from the start to the last moment at which a request could be scheduled.
        slo_seconds: answers within it are ok.
        stages: the pipeline's stages, in order.
        started_at: Unix time of second 0.
        gap_seconds: seconds for which a trace had no count.
        distinct_payloads: how many different payloads the requests took turns with.
        interrupted: it was stopped before its end; `duration_seconds` is what it came to.
        streamed: answers were asked for piece by piece.
        first_token_slo_seconds, between_tokens_slo_seconds: what is promised of those; None where nothing is.
    """

    pipeline: str
    load: str
    duration_seconds: float
    slo_seconds: float
    stages: tuple[str, ...]
    started_at: float
    gap_seconds: int = 0
    distinct_payloads: int = 0
    interrupted: bool = False
    streamed: bool = False
    first_token_slo_seconds: float | None = None
    between_tokens_slo_seconds: float | None = None

    @property
    def slo(self) -> ClientTimings:
        """SLOs of an answer."""
        first, between = self.first_token_slo_seconds, self.between_tokens_slo_seconds
        return ClientTimings(
            self.slo_seconds, math.inf if first is None else first, math.inf if between is None else between
        )


@dataclass(frozen=True, slots=True)
class ModalityResults:
    """What became of chats with images, or of those without.

    Attributes:
        received: how many were sent.
        answered: how many of these have an answer.
        slo_fraction: of those sent, the share answered in time.
        tokens: percentiles, in seconds, by `first_token_seconds_p50` and so on; empty without an answer.
    """

    received: int
    answered: int
    slo_fraction: float
    tokens: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Where the time went in one stage, by the answers; seconds, and rows of a batch on average."""

    queue_p50: float
    queue_p99: float
    service_p50: float
    service_p99: float
    mean_batch_size: float


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """All records of a run, in order of schedule.

    `records` is a structured array with the fields of `Record`, where `variant:STAGE`, `batch_size:STAGE`,
    `queue_seconds:STAGE`, `service_seconds:STAGE` and `operating_point:STAGE` stand for the visits; what is known of
    tokens is there where the load was streamed.
    """

    facts: RunFacts
    records: NDArray[Any] = field(repr=False)

    @classmethod
    def of(cls, facts: RunFacts, records: Sequence[Record]) -> "Results":
        """Lay records out as one array, sorted by their schedule."""
        array = np.zeros(len(records), dtype=_dtype(facts))
        for column in (*_NUMBERS, *(_STREAM_COLUMNS if facts.streamed else ())):
            array[column] = [getattr(record, column) for record in records]
        for column in _TEXT_LENGTHS:
            array[column] = [getattr(record, column) for record in records]
        for stage in facts.stages:
            visits = [record.visits.get(stage, StageVisit()) for record in records]
            for column in _VISIT_COLUMNS:
                array[f"{column}:{stage}"] = [getattr(visit, column) for visit in visits]
        return cls(facts, array[np.argsort(array["scheduled"], kind="stable")])

    def count(self, outcome: RequestOutcome) -> int:
        """Count the requests that ended so."""
        return int((self.records["outcome"] == outcome).sum())

    @property
    def answered(self) -> NDArray[Any]:
        """The records with an answer: ok and late."""
        answered: NDArray[Any] = self.records[self.records["outcome"] <= RequestOutcome.LATE]
        return answered

    def latency_percentiles(self) -> dict[str, float]:
        """HDR percentiles, in seconds, of the latency of all answers; empty without any."""
        return percentiles(self.answered["latency_seconds"])

    def token_percentiles(self) -> dict[str, float]:
        """HDR percentiles, in seconds, of the first token of answers and of the time between two; empty unstreamed."""
        return _token_percentiles(self.answered) if self.facts.streamed else {}

    def modalities(self) -> dict[str, ModalityResults]:
        """Chats without images (`text`) and with them (`image`), those that came; empty where none were streamed."""
        found: dict[str, ModalityResults] = {}
        for name, shows in zip(MODALITIES, (False, True), strict=True) if self.facts.streamed else ():
            records = self.records[(self.records["images"] > 0) == shows]
            if records.size:
                kept = float((records["outcome"] == RequestOutcome.OK).mean())
                answered = records[records["outcome"] <= RequestOutcome.LATE]
                found[name] = ModalityResults(records.size, answered.size, kept, _token_percentiles(answered))
        return found

    def stage_times(self, stage: str) -> StageTimes | None:
        """Sum up what the answers say of a stage; None where none says anything."""
        told = self.answered[~np.isnan(self.answered[f"service_seconds:{stage}"])]
        if not told.size:
            return None
        queue_p50, queue_p99 = np.quantile(told[f"queue_seconds:{stage}"], (0.5, 0.99)).tolist()
        service_p50, service_p99 = np.quantile(told[f"service_seconds:{stage}"], (0.5, 0.99)).tolist()
        batch_size = float(told[f"batch_size:{stage}"].mean())
        return StageTimes(queue_p50, queue_p99, service_p50, service_p99, batch_size)

    def summary(self) -> dict[str, Any]:
        """The figures of the run, with units in their names; None where nothing was there to measure."""
        received, answered, facts = len(self.records), self.answered, self.facts
        lateness = percentiles(np.maximum(self.records["sent"] - self.records["scheduled"], 0.0)).get("p99", 0.0)
        within_slo = self.count(RequestOutcome.OK)
        return {
            "received": received,
            **{outcome.word: self.count(outcome) for outcome in RequestOutcome},
            "slo_fraction": within_slo / received if received else None,
            "slo_seconds": facts.slo_seconds,
            **{f"latency_seconds_{name}": value for name, value in self.latency_percentiles().items()},
            **self.token_percentiles(),
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
            "failures": _counts(self.records["detail"][self.records["outcome"] == RequestOutcome.FAILED]),
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
        """Read what `save` wrote; ValueError names the file that is not a run's."""
        try:
            written = json.loads((folder / SUMMARY_FILE).read_text())["facts"]
            facts = RunFacts(**{**written, "stages": tuple(written["stages"])})
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{folder / SUMMARY_FILE} is not the record of a load: {error!r}") from error
        with np.load(folder / RECORDS_FILE, allow_pickle=False) as arrays:
            records = arrays["records"]
        if records.dtype != _dtype(facts):
            raise ValueError(f"{folder / RECORDS_FILE} holds other fields than {SUMMARY_FILE} speaks of")
        return cls(facts, records)

    def _drops(self) -> NDArray[Any]:
        dropped = self.records[self.records["outcome"] == RequestOutcome.DROPPED]
        places = np.char.add(np.char.add(dropped["drop_stage"], "/"), dropped["drop_reason"])
        return np.where(places == "/", "unknown", places)


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
    found: dict[str, float] = {}
    for column in TOKEN_TIMES:
        seconds = answered[column]
        found |= {f"{column}_{name}": value for name, value in percentiles(seconds[~np.isnan(seconds)]).items()}
    return found


def _by_modality(modalities: Mapping[str, ModalityResults]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, seen in modalities.items():
        figures |= {f"{name}_received": seen.received, f"{name}_slo_fraction": seen.slo_fraction}
        figures |= {f"{name}_{figure}": seconds for figure, seconds in seen.tokens.items()}
    return figures


def _dtype(facts: RunFacts) -> np.dtype[Any]:
    texts = [(name, f"U{length}") for name, length in _TEXT_LENGTHS.items()]
    visits = [(f"{column}:{stage}", kind) for stage in facts.stages for column, kind in _VISIT_COLUMNS.items()]
    streams = _STREAM_COLUMNS.items() if facts.streamed else ()
    return np.dtype([*_NUMBERS.items(), *texts, *visits, *streams])


def _ratio(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if whole else None


def _mean(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def _counts(values: NDArray[Any]) -> dict[str, int]:
    return {str(value): int(count) for value, count in zip(*np.unique(values, return_counts=True), strict=True)}
