"""Processes stop under requests: what hangs is replaced, nothing fails, and the sums match."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.first_week.checking import Check, Seen, require
from benchmarks.first_week.stranger import Up, until, up

REQUESTS_PER_SECOND = 10
MOST_SECONDS_WITHOUT = 5.0


@contextmanager
def asking(served: Up) -> Iterator[list[tuple[float, int]]]:
    """Send ten requests a second while the block runs; yields (when it ended, HTTP status) of each."""
    ended, stop, threads = [], threading.Event(), []

    def one() -> None:
        status, _ = served.ask()
        ended.append((time.monotonic(), status))

    def send() -> None:
        while not stop.wait(1 / REQUESTS_PER_SECOND):
            threads.append(threading.Thread(target=one, daemon=True))
            threads[-1].start()

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    try:
        yield ended
    finally:
        stop.set()
        sending.join()
        for thread in threads:
            thread.join(30)


def hung_model_server(folder: Path) -> Seen:
    """The only model server of a stage stops; another serves within five seconds, and no request fails."""
    with up(folder) as served:
        with asking(served) as ended:
            until(lambda: len(ended) > 20, "requests are answered")
            victim = served.model_server("first")
            os.kill(victim.pid, signal.SIGSTOP)
            stopped = time.monotonic()
            until(lambda: not victim.is_running(), "the one that hangs is killed")
            until(lambda: any(at > stopped + 0.5 and status == 200 for at, status in ended), "requests are answered")
            seconds = next(at for at, status in sorted(ended) if at > stopped + 0.5 and status == 200) - stopped
            time.sleep(2.0)  # of serving as before
        require("first-0 hung" in served.told(), "the log says nothing of it")
        _sums(served, ended)
    require(seconds <= MOST_SECONDS_WITHOUT, f"no answer for {seconds:.1f} s")
    return Seen("replaced", {"hung_model_server_seconds": round(seconds, 2)})


def hung_adapter(folder: Path) -> Seen:
    """The adapter stops; another decides, and callers notice nothing."""
    with up(folder) as served, asking(served) as ended:
        until(lambda: len(ended) > 5, "requests are answered")
        (victim,) = served.running("trimtab_adapter")
        os.kill(victim.pid, signal.SIGSTOP)
        seconds = until(lambda: [p for p in served.running("trimtab_adapter") if p.pid != victim.pid], "it is replaced")
        decided = (served.folder / "decisions.jsonl").stat().st_size
        until(lambda: (served.folder / "decisions.jsonl").stat().st_size > decided, "the other one decides")
        require({status for _, status in ended} == {200}, f"answers {Counter(status for _, status in ended)}")
        require("the adapter hung" in served.told(), "the log says nothing of it")
    return Seen("replaced", {"hung_adapter_seconds": round(seconds, 2)})


def hung_router(folder: Path) -> Seen:
    """The router stops; another serves at the same ports."""
    with up(folder) as served:
        (victim,) = [p for p in served.running("trimtab_router") if "trimtab_router.envoy" not in " ".join(p.cmdline())]
        os.kill(victim.pid, signal.SIGSTOP)
        seconds = until(lambda: _answers(served), "requests are answered again")
        require(not victim.is_running(), "the one that hangs is still there")
    return Seen("replaced", {"hung_router_seconds": round(seconds, 2)})


def _answers(served: Up) -> bool:
    try:
        return served.ask(1.0)[0] == 200
    except OSError:
        return False


def _sums(served: Up, ended: list[tuple[float, int]]) -> None:
    """What callers saw is what the router counted, and none failed."""
    counters = served.counters()
    require(counters["failed"] == 0, f"{counters['failed']:.0f} requests failed")
    require(counters["received"] == len(ended), f"{len(ended)} sent, {counters['received']:.0f} received")
    ends = sum(count for name, count in counters.items() if name != "received")
    require(ends == counters["received"], f"{counters['received']:.0f} received, {ends:.0f} ended")


CHECKS = (
    Check("faults", "a model server that hangs is replaced", hung_model_server),
    Check("faults", "an adapter that hangs is replaced", hung_adapter),
    Check("faults", "a router that hangs is replaced", hung_router),
)
