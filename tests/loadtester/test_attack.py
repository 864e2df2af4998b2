"""Attack: every request is accounted for, and latencies include stalls."""

import asyncio
import time
from collections import Counter
from typing import Any, Self

import numpy as np
import pytest

from tests.loadtester.fake_pipeline import FakePipeline, a_pipeline, grpc_server, rest_server
from tests.processes import held_port
from trimtab_loadtester.attack import AttackOptions, Progress, attack_async
from trimtab_loadtester.load_spec import LoadSpec
from trimtab_loadtester.payloads.interface import Outputs, Payload, Score
from trimtab_loadtester.results import ClientTimings, Results, classify
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_protocol import Tensor

REST_ACTIONS = ("ok", "late", "504", "429", "503", "500", "400", "drop connection", "garbage")
GRPC_ACTIONS = ("ok", "late", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL")


def outcomes(results: Results) -> dict[str, int]:
    """Count by outcome, ok and late in one: which of the two an answer is depends on how busy the machine is."""
    summary = results.summary()
    answered = summary["ok"] + summary["late"]
    return {"answered": answered, **{name: summary[name] for name in ("dropped", "refused", "failed")}}


async def attack_at(address: str, rps: int, seconds: float, **options: Any) -> Results:
    arguments = {name: options.pop(name) for name in ("on_progress", "stop", "source", "arrivals") if name in options}
    given = AttackOptions(duration_seconds=seconds, **options)
    return await attack_async(a_pipeline(), address, LoadSpec.parse(f"constant:{rps}"), given, **arguments)


async def test_rest_responses_are_classified_by_code() -> None:
    fake = FakePipeline(script=lambda number: REST_ACTIONS[number % len(REST_ACTIONS)])
    async with rest_server(fake) as address:
        results = await attack_at(address, 150, 1.2)

    seen, summary = fake.seen, results.summary()
    failed = seen["500"] + seen["400"] + seen["drop connection"] + seen["garbage"]
    assert outcomes(results) == {
        "answered": seen["ok"] + seen["late"],
        "dropped": seen["504"],
        "refused": seen["429"] + seen["503"],
        "failed": failed,
    }
    assert results.count(RequestOutcome.LATE) >= seen["late"]
    assert summary["received"] == seen.total() == sum(outcomes(results).values()) > 100
    assert summary["codes"]["ConnectionLost"] == seen["drop connection"]
    assert summary["codes"]["ProtocolError"] == seen["garbage"]
    assert summary["drops"] == {"first/predicted": seen["504"]}
    assert summary["failures"]["scripted 500"] == seen["500"]
    assert summary["slo_fraction"] == summary["ok"] / seen.total()


async def test_requests_are_sent_when_due() -> None:
    due = np.array([0.0, 0.01, 0.3])
    async with rest_server(FakePipeline(script=lambda _: "ok")) as address:
        results = await attack_at(address, 200, 0.5, arrivals=due)

    assert results.records["scheduled"].tolist() == due.tolist()
    assert results.facts.duration_seconds == 0.5


async def test_grpc_responses_are_classified_by_code() -> None:
    fake = FakePipeline(script=lambda number: GRPC_ACTIONS[number % len(GRPC_ACTIONS)])
    async with grpc_server(fake) as address:
        results = await attack_at(address, 120, 1.0, protocol="gRPC")

    seen = fake.seen
    assert outcomes(results) == {
        "answered": seen["ok"] + seen["late"],
        "dropped": seen["DEADLINE_EXCEEDED"],
        "refused": seen["RESOURCE_EXHAUSTED"] + seen["UNAVAILABLE"],
        "failed": seen["INTERNAL"],
    }
    assert results.count(RequestOutcome.LATE) >= seen["late"]
    assert results.summary()["drops"] == {"first/past": seen["DEADLINE_EXCEEDED"]}


@pytest.mark.parametrize(("protocol", "code"), [("REST", "ConnectionRefused"), ("gRPC", "ConnectionLost")])
async def test_unreachable_server_counts_as_failed(protocol, code) -> None:
    with held_port() as port:
        results = await attack_at(f"127.0.0.1:{port}", 50, 0.2, protocol=protocol)

    assert results.summary()["codes"] == {code: len(results.records)}
    assert outcomes(results)["failed"] == len(results.records) > 0


async def test_latency_counts_from_the_schedule_through_a_stall() -> None:
    """At most four requests are in flight: a stall of 1 s delays all that are due meanwhile."""
    fake = FakePipeline()
    fake.open.clear()
    async with rest_server(fake) as address:
        run = asyncio.create_task(attack_at(address, 100, 1.5, max_outstanding=4))
        await fake.arrived.wait()
        asyncio.get_running_loop().call_later(1.0, fake.open.set)
        results = await run

    scheduled, latency = results.records["scheduled"], results.records["latency_seconds"]
    during = scheduled - scheduled[0] < 0.9
    assert during.sum() > 60
    assert (latency[during] >= 1.0 - (scheduled[during] - scheduled[0]) - 0.01).all()
    assert results.summary()["client_saturated"] is True
    assert results.summary()["latency_seconds_p90"] > 0.8
    assert (results.records["sent"] >= scheduled - 1e-6).all()


class Pauses:
    """Longest stall of the event loop within a block, most likely caused by the machine."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._ticking is not None
        self._ticking.cancel()
        await asyncio.gather(self._ticking, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(0.01)
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - begun)


async def test_requests_are_sent_when_due_during_a_stall() -> None:
    fake, paused = FakePipeline(), Pauses()
    fake.open.clear()

    def answer_once_all_came(progress: Progress) -> None:
        if fake.seen.total() == progress.scheduled:
            fake.open.set()

    async with rest_server(fake) as address, paused:
        results = await attack_at(address, 200, 0.5, progress_seconds=0.05, on_progress=answer_once_all_came)

    assert results.summary()["codes"] == {"200": len(results.records)}
    assert fake.seen.total() == len(results.records) > 60
    assert results.summary()["client_lateness_seconds_p99"] < 0.1 + paused.longest_seconds


async def test_unanswered_requests_time_out() -> None:
    fake = FakePipeline()
    fake.open.clear()
    async with rest_server(fake) as address:
        results = await attack_at(address, 200, 0.5, give_up_seconds=1.0)
        fake.open.set()

    assert results.summary()["codes"] == {"GaveUp": len(results.records)}
    assert outcomes(results)["failed"] == len(results.records) > 60


async def test_payloads_differ_and_results_name_operating_points(tmp_path) -> None:
    fake = FakePipeline()
    fake.open.clear()
    reports: list[Progress] = []

    def answer_after_six_reports(progress: Progress) -> None:
        reports.append(progress)
        if len(reports) > 5:
            fake.open.set()

    async with rest_server(fake) as address:
        options = {"deadline_seconds": 0.2, "progress_seconds": 0.1}
        results = await attack_at(address, 80, 1.0, on_progress=answer_after_six_reports, **options)

    assert len(fake.bodies) == len(fake.request_ids) == len(results.records)
    assert all(parameters["timeout"] == 200_000 for parameters in fake.parameters)
    assert Counter(results.records["variant:first"]) == {"echo": len(results.records)}
    assert set(results.records["batch_size:first"]) == {3}
    assert set(results.records["operating_point:first"]) == {"half"}
    assert set(results.records["queue_seconds:first"]) == {0.002}
    assert np.isnan(results.records["service_seconds:first"]).all(), "malformed values stay unknown"
    assert results.summary()["expected_accuracy"] == 0.75
    assert results.summary()["measured_accuracy"] is None
    assert reports[-1].sent == reports[-1].scheduled == sum(reports[-1].outcomes.values()) == len(results.records)
    assert len(reports) > 5

    results.save(tmp_path)
    again = Results.load(tmp_path)
    assert again.facts == results.facts
    assert again.summary() == results.summary()


class Careless:
    """Source that cannot score the response to every second payload."""

    def payload(self, index: int) -> Payload:
        return Payload((Tensor.of("x", np.array([[index]], np.float32)),), index)

    def score(self, truth: object, _: Outputs) -> Score:
        if truth % 2:  # type: ignore[operator]
            raise AttributeError("no such luck")
        return Score(1, 1)


async def test_unscorable_response_fails_alone() -> None:
    async with rest_server(FakePipeline()) as address:
        results = await attack_at(address, 60, 0.5, source=Careless())

    unjudged = len(results.records) // 2
    assert unjudged > 0
    assert results.summary()["codes"] == {"200": len(results.records) - unjudged, "InvalidResponse": unjudged}
    assert results.summary()["failures"] == {"the response cannot be scored: AttributeError('no such luck')": unjudged}


async def test_requests_reuse_payloads_in_turn() -> None:
    fake = FakePipeline()
    async with rest_server(fake) as address:
        results = await attack_at(address, 100, 0.5, max_payloads=7)

    assert len(fake.bodies) == results.summary()["distinct_payloads"] == 7 < len(results.records)


class Pictures:
    """Source of different texts of a mebibyte each."""

    def payload(self, index: int) -> Payload:
        text = str(index).encode().ljust(2**20)
        return Payload((Tensor("x", "BYTES", np.array([[text]], dtype=object)),))

    def score(self, _: object, __: Outputs) -> Score:
        return Score()


@pytest.mark.parametrize("protocol", ["REST", "gRPC"])
async def test_payload_pool_is_bounded_by_bytes(protocol) -> None:
    """No server listens: payloads are prepared before the first request is sent."""
    options = {"protocol": protocol, "max_payload_bytes": 4 * 2**20}
    with held_port() as port:
        results = await attack_at(f"127.0.0.1:{port}", 100, 0.5, source=Pictures(), **options)

    assert results.summary()["distinct_payloads"] == 4 < len(results.records)


async def test_stop_ends_sending_and_keeps_results() -> None:
    fake, stop = FakePipeline(), asyncio.Event()
    async with rest_server(fake) as address:

        def stop_after_20(progress: Progress) -> None:
            if sum(progress.outcomes.values()) >= 20:
                stop.set()

        results = await attack_at(address, 100, 30.0, progress_seconds=0.01, on_progress=stop_after_20, stop=stop)

    summary = results.summary()
    assert outcomes(results)["answered"] == summary["received"] == fake.seen.total() >= 20
    assert summary["interrupted"] is True
    assert results.facts.duration_seconds < 10


async def test_load_without_requests_has_an_empty_summary() -> None:
    results = await attack_at("127.0.0.1:1", 0, 0.1)

    assert results.summary()["received"] == 0
    assert results.summary()["slo_fraction"] is None


async def test_unknown_payloads_are_rejected() -> None:
    with pytest.raises(ValueError, match="known payloads: digits, digits-av"):
        await attack_async(a_pipeline(payloads="cats"), "127.0.0.1:1", LoadSpec.parse("steps:1x1"))


@pytest.mark.parametrize(
    ("latency_seconds", "first_seconds", "between_seconds", "outcome"),
    [
        (0.5, 0.2, 0.02, RequestOutcome.OK),
        (0.51, 0.2, 0.02, RequestOutcome.LATE),
        (0.4, 0.21, 0.02, RequestOutcome.LATE),
        (0.4, 0.2, 0.03, RequestOutcome.LATE),
        (0.4, 0.2, float("nan"), RequestOutcome.OK),
    ],
)
def test_answer_is_late_by_any_slo(
    latency_seconds: float, first_seconds: float, between_seconds: float, outcome: RequestOutcome
) -> None:
    took = ClientTimings(latency_seconds, first_seconds, between_seconds)

    assert classify("200", took, ClientTimings(0.5, 0.2, 0.02)) is outcome
    assert classify("OK", took, ClientTimings(1.0, float("inf"), float("inf"))) is RequestOutcome.OK
