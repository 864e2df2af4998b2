"""Operator process, `python -m trimtab_operator`: watches the cluster, and reconciles while it is the leader."""

import asyncio
import logging
import sys

from trimtab_kubernetes import Cluster, ClusterError
from trimtab_kubernetes.lease import Lease, leader_election
from trimtab_kubernetes.process import serve_probes, stop_requested, wait_until
from trimtab_operator.controller import Controller
from trimtab_operator.metrics import Metrics
from trimtab_operator.settings import Settings
from trimtab_pipelines.kubernetes_names import OPERATOR_MANAGER


async def run(settings: Settings, metrics: Metrics) -> None:
    """Run until a signal, or until watching or leading fails."""
    stop = stop_requested()
    async with (
        await Cluster.connect() as cluster,
        serve_probes(settings.health_port, settings.metrics_port, metrics.registry),
    ):
        controller = Controller(cluster, settings, metrics)
        lease = Lease(cluster, settings.own_namespace, OPERATOR_MANAGER, settings.identity)
        watching = asyncio.create_task(controller.watch())
        async with leader_election(lease, controller.lead) as working:
            await wait_until(stop, watching, working)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def main() -> int:
    """Run the operator; exit code 2 without a cluster."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(run(Settings.from_environment(), Metrics()))
    except ClusterError as error:
        sys.stderr.write(f"trimtab_operator: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
