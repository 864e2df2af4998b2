"""`python -m benchmarks.clients`: clients that nobody here wrote call a pipeline, and each answer is checked.

Without addresses small pipelines are served for them, as `trimtab up` serves one, one of them for those who chat: first
in plain text, then through TLS and for callers with an API key alone. With `--rest` and `--grpc` they call
what runs there: any pipeline whose input `x` is a row of four FP32 and whose output `y` is x + 2; through TLS with
`--ca`, and with an API key in the environment variable TRIMTAB_API_KEY. The last line is one of JSON.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.clients import scripted, triton
from benchmarks.clients.chats import CHAT_CLIENTS
from benchmarks.clients.grpc_tools import GRPC_TOOLS
from benchmarks.clients.h2spec import h2spec
from benchmarks.clients.http_tools import HTTP_TOOLS
from benchmarks.clients.serving import served, served_chats
from benchmarks.clients.target import Target
from benchmarks.clients.tools import AbsentError
from trimtab.app import run_reporting_errors
from trimtab_pipelines.result_line import ResultLine, threshold

Client = Callable[[Target], str]

CLIENTS: Mapping[str, Client] = {
    "tritonclient_http": triton.over_http,
    "tritonclient_grpc": triton.over_grpc,
    "tritonclient_http_aio": triton.over_http_aio,
    "tritonclient_grpc_aio": triton.over_grpc_aio,
    **HTTP_TOOLS,
    **GRPC_TOOLS,
    "node_grpc": scripted.node_grpc,
    "kserve_rest": scripted.kserve_rest,
    "kserve_grpc": scripted.kserve_grpc,
    "h2spec": h2spec,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one client."""

    client: str
    outcome: Literal["ok", "failed", "skipped"]
    words: str


def try_out(name: str, client: Client, target: Target) -> Verdict:
    """Run one client; nothing it does stops the others."""
    called = f"{name}{target.manner}"
    try:
        return Verdict(called, "ok", client(target))
    except AbsentError as reason:
        return Verdict(called, "skipped", str(reason))
    except Exception as error:  # noqa: BLE001  (strangers raise what they like)
        return Verdict(called, "failed", f"{type(error).__name__}: {error}")


def judge(verdicts: Sequence[Verdict], *, all_required: bool) -> ResultLine:
    """No client may fail; with `all_required` none may be missing either."""
    counts = {outcome: sum(v.outcome == outcome for v in verdicts) for outcome in ("ok", "failed", "skipped")}
    bars = [
        threshold("clients that failed", counts["failed"], "==", 0),
        threshold("clients that were served", counts["ok"], ">=", 1),
    ]
    if all_required:
        bars.append(threshold("clients that could not be tried", counts["skipped"], "==", 0))
    told = {verdict.client: f"{verdict.outcome}: {verdict.words}" for verdict in verdicts}
    return ResultLine(name="clients", figures={f"clients_{k}": n for k, n in counts.items()} | told, bars=tuple(bars))


async def call_all(given: argparse.Namespace) -> list[Verdict]:
    """Let the clients call one after the other, in each manner in turn."""
    verdicts = []
    for clients, opening in _targets(given):
        chosen = {name: clients[name] for name in given.only or clients if name in clients}
        if chosen:
            async with opening as target:
                verdicts += [await _called(name, client, target) for name, client in chosen.items()]
    return verdicts


async def _called(name: str, client: Client, target: Target) -> Verdict:
    """Let one call, and say on stderr how it fares."""
    began = time.monotonic()
    verdict = await asyncio.to_thread(try_out, name, client, target)
    spent = time.monotonic() - began
    sys.stderr.write(f"{verdict.outcome:8}{verdict.client:32}{spent:6.1f} s  {verdict.words}\n")
    return verdict


def _targets(given: argparse.Namespace) -> Iterator[tuple[Mapping[str, Client], AbstractAsyncContextManager[Target]]]:
    """Who calls, and where."""
    if given.rest:
        yield (
            CLIENTS,
            nullcontext(Target(given.rest, given.grpc, given.model, given.ca, os.environ.get("TRIMTAB_API_KEY"))),
        )
        return
    for secured in (False, True):
        yield CLIENTS, served(secured=secured)
        yield CHAT_CLIENTS, served_chats(secured=secured)


def main() -> int:
    """Run the clients asked for; the exit code is 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__)
    parser.add_argument("--rest", metavar="HOST:PORT", help="a pipeline that runs already; needs --grpc")
    parser.add_argument("--grpc", metavar="HOST:PORT")
    parser.add_argument("--model", default="echo", help="its name")
    parser.add_argument("--ca", type=Path, help="speak TLS, and trust this certificate authority")
    parser.add_argument(
        "--only", action="append", choices=sorted({**CLIENTS, **CHAT_CLIENTS}), help="only this client; may be repeated"
    )
    parser.add_argument("--require-all", action="store_true", help="a client that cannot be installed fails the run")
    given = parser.parse_args()
    if bool(given.rest) != bool(given.grpc):
        parser.error("--rest and --grpc go together")
    outcome = judge(asyncio.run(call_all(given)), all_required=given.require_all)
    outcome.print()
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(run_reporting_errors(main))
