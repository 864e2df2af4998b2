"""Run the adapter: `python -m trimtab_adapter --pipeline FILE --profiles FILE --plan FILE --decisions FILE …`."""

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from trimtab_adapter.documents import Documents
from trimtab_adapter.forecasting import PlayedTrace, forecaster_for
from trimtab_adapter.journal import Journal
from trimtab_adapter.loop import Loop, Outlets
from trimtab_adapter.prometheus import PrometheusSource
from trimtab_adapter.sources import LoadSource, RouterSource
from trimtab_pipelines.documents import DocumentError

HTTP_TIMEOUT_SECONDS = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and adapt until SIGTERM or SIGINT; 2 where the documents cannot be used."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s adapter %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        documents = Documents(options.pipeline, options.profiles)
    except DocumentError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    asyncio.run(_adapt(options, documents))
    return 0


async def _adapt(options: argparse.Namespace, documents: Documents) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    pipeline = documents.pipeline
    async with httpx.AsyncClient(timeout=HTTP_TIMEOUT_SECONDS, trust_env=False) as client:
        router = None if options.router is None else RouterSource(client, options.router)
        loads: LoadSource | None = router
        if options.prometheus is not None:
            loads = PrometheusSource(client, options.prometheus, pipeline.metadata.namespace, pipeline.name)
        if loads is None:
            raise RuntimeError("neither --router nor --prometheus was given; the command line should have refused this")
        outlets = Outlets(options.plan, Journal(options.decisions))
        trace = None if options.trace is None else PlayedTrace(options.trace, options.trace_start or time.time())
        forecaster = forecaster_for(pipeline.spec.adaptation, trace)
        await Loop(documents, outlets, loads, router, forecaster).run(stop)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("trimtab_adapter", description="Decides what a pipeline should run.")
    parser.add_argument("--pipeline", type=Path, required=True, help="InferencePipeline, a file or its folder")
    parser.add_argument("--profiles", type=Path, required=True, help="ModelProfiles, a file or their folder")
    parser.add_argument("--plan", type=Path, required=True, help="PipelinePlan to write, replaced in one step")
    parser.add_argument("--decisions", type=Path, required=True, help="journal of decisions to append to")
    parser.add_argument("--router", help="address of the router, such as http://127.0.0.1:8080")
    parser.add_argument("--prometheus", help="take the load from this Prometheus instead of the router")
    parser.add_argument("--trace", type=Path, help="what the load will be, for the Oracle forecaster")
    parser.add_argument("--trace-start", type=float, help="Unix time of the trace's first second; else now")
    options = parser.parse_args(arguments)
    if options.router is None and options.prometheus is None:
        parser.error("give --router, --prometheus or both: the load must come from somewhere")
    return options


if __name__ == "__main__":
    sys.exit(main())
