"""Command line of the adapter: one pipeline from files, or with `--cluster` all InferencePipelines of a cluster.

`python -m trimtab_adapter --pipeline FILE --profiles FILE --plan FILE --decisions FILE --router URL`
`python -m trimtab_adapter --cluster [--namespaces a,b] [--prometheus URL]`
"""

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trimtab_adapter.control_loop import ControlLoop, LoadSources
from trimtab_adapter.files import FileConfigSource, FilePlanPublisher
from trimtab_adapter.forecasting import PlayedTrace, forecaster_for
from trimtab_adapter.load_sources import LoadSource, PrometheusSource, RouterSource
from trimtab_pipelines.documents import DocumentError
from trimtab_pipelines.processes.malloc_tuning import release_freed_memory
from trimtab_predictor.metrics_client import PrometheusServer, open_session, tls_context

HTTP_TIMEOUT_SECONDS = 2.0
HEARTBEAT_SECONDS = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run until SIGTERM or SIGINT; 2 if the documents are invalid."""
    options = parse(arguments)
    release_freed_memory()  # of the imports
    logging.basicConfig(level=logging.INFO, format="%(asctime)s adapter %(levelname)s %(message)s", stream=sys.stderr)
    try:
        if options.cluster:
            from trimtab_adapter.cluster.main import adapt_cluster  # noqa: PLC0415 (an extra: files need no Kubernetes)

            problem = asyncio.run(adapt_cluster(options))
        else:
            problem = ""
            asyncio.run(_adapt(options, FileConfigSource(options.pipeline, options.profiles, options.gpus)))
    except DocumentError as error:
        problem = str(error)
    if problem:
        sys.stderr.write(f"{problem}\n")
    return 2 if problem else 0


async def _adapt(options: argparse.Namespace, config: FileConfigSource) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    pipeline = config.pipeline
    async with open_session(HTTP_TIMEOUT_SECONDS, tls=tls_context(options.prometheus_ca)) as session:
        router = None if options.router is None else RouterSource(session, options.router)
        loads: LoadSource | None = router
        if options.prometheus is not None:
            server = PrometheusServer(session, options.prometheus, options.prometheus_token_file)
            loads = PrometheusSource(server, pipeline.metadata.namespace, pipeline.name)
        if loads is None:
            raise RuntimeError("neither --router nor --prometheus was given")
        publisher = FilePlanPublisher(options.plan, options.decisions)
        trace = None if options.trace is None else PlayedTrace(options.trace, options.trace_start or time.time())
        forecaster = forecaster_for(pipeline.spec.adaptation, trace)
        heartbeats = asyncio.create_task(_send_heartbeats()) if options.heartbeat else None
        await ControlLoop(config, publisher, LoadSources(loads, router), forecaster).run(stop)
        if heartbeats is not None:
            heartbeats.cancel()


async def _send_heartbeats() -> None:
    """Write an empty line to stdout each second, for the supervisor."""
    while True:
        sys.stdout.write("\n")
        sys.stdout.flush()
        await asyncio.sleep(HEARTBEAT_SECONDS)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "trimtab_adapter", description="Plans the variants, batch sizes and replicas of a pipeline."
    )
    parser.add_argument("--cluster", action="store_true", help="plan all InferencePipelines of the cluster")
    parser.add_argument("--namespaces", default="", help="only pipelines of these namespaces, separated by commas")
    parser.add_argument(
        "--weights", type=Path, help="folder of lstm.npz, the weights to forecast with if the file exists"
    )
    parser.add_argument("--pools", type=Path, help="file of budgets that several pipelines share")
    parser.add_argument(
        "--health-port", type=int, default=8080, help="port of /healthz in a cluster; 0 for any free port"
    )
    parser.add_argument(
        "--metrics-port", type=int, default=9090, help="port of /metrics in a cluster; 0 for any free port"
    )
    parser.add_argument("--pipeline", type=Path, help="InferencePipeline, a file or its folder")
    parser.add_argument("--profiles", type=Path, help="ModelProfiles, a file or their folder")
    parser.add_argument("--gpus", type=int, help="most GPUs to plan, if the machine has fewer than the budget")
    parser.add_argument("--plan", type=Path, help="PipelinePlan to write, replaced atomically")
    parser.add_argument("--decisions", type=Path, help="decision log to append to")
    parser.add_argument("--router", help="address of the router, such as http://127.0.0.1:8080")
    parser.add_argument("--prometheus", help="take the load from this Prometheus instead of the router")
    parser.add_argument("--prometheus-token-file", type=Path, help="bearer token file, read for each query")
    parser.add_argument("--prometheus-ca", type=Path, help="certificate authorities to trust for Prometheus")
    parser.add_argument("--heartbeat", action="store_true", help="write an empty line to stdout each second")
    parser.add_argument("--trace", type=Path, help="future load for the Oracle forecaster")
    parser.add_argument("--trace-start", type=float, help="Unix time of the trace's first second; default now")
    options = parser.parse_args(arguments)
    if options.cluster:
        return options
    for name in ("pipeline", "profiles", "plan", "decisions"):
        if getattr(options, name) is None:
            parser.error(f"give --{name}, or --cluster")
    if options.router is None and options.prometheus is None:
        parser.error("give --router, --prometheus or both as the source of the load")
    return options


if __name__ == "__main__":
    sys.exit(main())
