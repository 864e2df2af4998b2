"""The table for people and the bars, from what happened."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.hostile.course import Course
from benchmarks.hostile.door import SLO_SECONDS
from benchmarks.hostile.kinds import Kind
from benchmarks.hostile.phases import CALM, FRIENDLY_RPS, Seen, together
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold

STOP_SHARE = 0.2
"""Of the SLO, the longest stop of the router's loop."""
P99_RATIO = 2.0
P99_FLOOR_SECONDS = 0.010
"""Below it a calm p99 says more about the machine than about the router."""
FRIENDLY_SHARE = 0.5
"""Of the friendly requests that are due: where fewer were sent, who sends them has ended early."""
MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What was left when all had gone."""

    bytes_in_flight: int
    open_connections: int
    received: int
    accounted: int
    faults: tuple[str, ...] = ()
    """What ended unasked, as the supervisor noted it: router, Envoy, model servers."""


def table(kinds: Sequence[Kind], course: Course, seen: Mapping[str, Seen]) -> Table:
    """One line a kind."""
    page = Table(title="hostile callers, each beside 20 friendly requests a second")
    for column in ("kind", "met", "friendly not ok", "p99 ms", "longest stop ms", "peak MiB"):
        page.add_column(column, justify="left" if column in {"kind", "met"} else "right", overflow="fold")
    for kind in kinds:
        if kind.name not in seen:
            continue
        friendly, verdict = seen[kind.name], course.verdicts[kind.name]
        peaks = " + ".join(f"{size // MEBIBYTE}" for size in course.peak_bytes[kind.name].values())
        met = str(verdict) if verdict.holds else f"[red]{verdict}[/red] (right: {', '.join(sorted(kind.right))})"
        if kind.name in course.replaced:
            met += f" [red]ended: {course.replaced[kind.name]}[/red]"
        unwell = f"{friendly.not_ok} of {friendly.sent}"
        page.add_row(
            f"{kind.family}: {kind.name}",
            met,
            f"[red]{unwell}[/red]" if friendly.not_ok else unwell,
            f"{1000 * friendly.quantile_seconds(0.99):.0f}",
            f"{1000 * friendly.longest_stop_seconds:.0f}",
            peaks,
        )
    return page


def outcome(course: Course, seen: Mapping[str, Seen], limits_bytes: Mapping[str, int], after: Aftermath) -> ResultLine:
    """Judge the run."""
    calm, hostile = seen[CALM], together(found for kind, found in seen.items() if kind != CALM)
    missed = [kind for kind, verdict in course.verdicts.items() if not verdict.holds]
    p99, calm_p99 = hostile.quantile_seconds(0.99), calm.quantile_seconds(0.99)
    ratio = p99 / max(calm_p99, P99_FLOOR_SECONDS)
    peaks = {who: max(peak.get(who, 0) for peak in course.peak_bytes.values()) for who in _present(course)}
    harmed = [kind for kind, found in seen.items() if kind != CALM and found.not_ok]
    stops = {kind: found.longest_stop_seconds for kind, found in seen.items() if kind != CALM}
    longest = max(stops, key=lambda kind: stops[kind], default="")
    figures: dict[str, float | int | str | None] = {
        "kinds": len(course.verdicts),
        "kinds_without_their_code": len(missed),
        "without_their_code": "; ".join(missed),
        "friendly_requests": hostile.sent,
        "friendly_not_ok": hostile.not_ok,
        "friendly_harmed_by": "; ".join(harmed),
        "friendly_left_to_the_machine": hostile.left_to_the_machine,
        "friendly_wrong": sum(n for code, n in hostile.codes.items() if code.startswith("wrong")),
        "friendly_p99_seconds": round(p99, 4),
        "calm_requests": calm.sent,
        "calm_not_ok": calm.not_ok,
        "calm_left_to_the_machine": calm.left_to_the_machine,
        "calm_p99_seconds": round(calm_p99, 4),
        "calm_longest_stop_seconds": round(calm.longest_stop_seconds, 4),
        "longest_stop_by": longest,
        "kinds_that_stopped_the_loop": sum(stop > STOP_SHARE * SLO_SECONDS for stop in stops.values()),
        "ended_by": "; ".join(f"{who} by {kind}" for kind, who in course.replaced.items()),
        "ended": "; ".join(after.faults),
        **{f"{who}_peak_mib": round(peak / MEBIBYTE, 1) for who, peak in peaks.items()},
    }
    bars = [
        accompanied(hostile, sum(phase.ended - phase.began for phase in course.phases if phase.kind != CALM)),
        threshold("friendly requests not ok beside hostile ones", hostile.not_ok, "==", 0),
        threshold("friendly p99 beside hostile ones over calm p99", round(ratio, 2), "<=", P99_RATIO),
        threshold("kinds that neither got their code nor were cut", len(missed), "==", 0),
        threshold(
            "longest stop of the router's loop, seconds",
            round(hostile.longest_stop_seconds, 4),
            "<=",
            STOP_SHARE * SLO_SECONDS,
        ),
        threshold("processes that ended", max(len(course.replaced), len(after.faults)), "==", 0),
        *_memory(peaks, limits_bytes),
        *_settled(after),
    ]
    return ResultLine(name="hostile", figures=figures, bars=tuple(bars))


def accompanied(seen: Seen, seconds: float) -> Threshold:
    """Whether friendly callers were there all the while: half of those who should have come, and one at least."""
    return threshold("friendly requests", seen.asked, ">=", max(round(FRIENDLY_SHARE * FRIENDLY_RPS * seconds), 1))


def _present(course: Course) -> list[str]:
    return sorted({who for peak in course.peak_bytes.values() for who in peak})


def _memory(peaks: Mapping[str, int], limits_bytes: Mapping[str, int]) -> list[Threshold]:
    return [
        threshold(f"peak memory of {who}, MiB", round(peak / MEBIBYTE, 1), "<=", limits_bytes[who] / MEBIBYTE)
        for who, peak in peaks.items()
    ]


def _settled(after: Aftermath) -> list[Threshold]:
    return [
        threshold("received less ok, late, dropped, refused and failed", after.received - after.accounted, "==", 0),
        threshold("bytes in flight afterwards", after.bytes_in_flight, "==", 0),
        threshold("connections open afterwards", after.open_connections, "==", 0),
    ]
