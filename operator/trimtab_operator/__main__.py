"""`python -m trimtab_operator`: the operator as a process. Follows everything, and works while it leads."""

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
    """Run wait_until told to stop; what ends following or leader_election ends this too."""
    stop = stop_requested()
    async with (
        await Cluster.connect() as cluster,
        serve_probes(settings.health_port, settings.metrics_port, metrics.registry),
    ):
        controller = Controller(cluster, settings, metrics)
        lease = Lease(cluster, settings.own_namespace, OPERATOR_MANAGER, settings.identity)
        following = asyncio.create_task(controller.watch())
        async with leader_election(lease, controller.lead) as working:
            await wait_until(stop, following, working)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def main() -> int:
    """Run the operator; exit code 2 where there is no cluster to talk to."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(run(Settings.from_environment(), Metrics()))
    except ClusterError as error:
        sys.stderr.write(f"trimtab_operator: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
