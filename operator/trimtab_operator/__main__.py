"""`python -m trimtab_operator`: the operator as a process."""

import asyncio
import logging
import sys
from typing import Any, cast

import kopf
from prometheus_client import start_http_server

from trimtab_kubernetes import Cluster, ClusterError, NotFound
from trimtab_operator.controller import OWN_KINDS
from trimtab_operator.handlers import Plumbing
from trimtab_operator.metrics import Metrics
from trimtab_operator.settings import Settings

log = logging.getLogger(__name__)

_ASK_AGAIN_SECONDS = 2.0


async def run(settings: Settings, metrics: Metrics, stop: asyncio.Event | None = None) -> None:
    """Run until told to stop by a signal or the event."""
    await wait_for_kinds(settings)
    plumbing = Plumbing(settings, metrics)
    await kopf.operator(
        registry=plumbing.registry,
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
        identity=cast("Any", settings.identity),  # else kopf asks for the name of the user, who has none in a container
        liveness_endpoint=f"http://0.0.0.0:{settings.health_port}/healthz",
        stop_flag=stop,
    )


async def wait_for_kinds(settings: Settings) -> None:
    """Wait until the API server is there and knows our kinds: kopf looks for them only once."""
    async with await Cluster.connect() as cluster:
        while True:
            try:
                for kind in OWN_KINDS:
                    await cluster.list(kind, settings.namespaces[0] if settings.namespaces else None)
            except NotFound as error:
                log.warning("%s; install the chart trimtab-crds", error)
            except ClusterError as error:
                log.warning("%s", error)
            else:
                return
            await asyncio.sleep(_ASK_AGAIN_SECONDS)


def main() -> int:
    """Run the operator; exit code 2 where there is no cluster to talk to."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for noisy in ("kopf.objects", "kopf.activities", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    settings, metrics = Settings.from_environment(), Metrics()
    start_http_server(settings.metrics_port, registry=metrics.registry)
    try:
        asyncio.run(run(settings, metrics))
    except ClusterError as error:
        sys.stderr.write(f"trimtab_operator: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
