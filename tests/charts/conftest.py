"""API server with the chart installed twice: with default values, and limited to two namespaces."""

import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests import control_plane
from tests.charts.helm import CHART, RELEASE_NAMESPACE, VALUES, must
from trimtab_kubernetes import Cluster

NARROW_NAMESPACE = "narrow-system"


@pytest.fixture(scope="session")
def installed() -> Iterator[Path]:
    """The kubeconfig of an API server with both releases."""
    with control_plane.api_server() as kubeconfig:
        everywhere = ("-n", RELEASE_NAMESPACE, "--create-namespace", "--set", "trainer.enabled=true")
        prometheus = ("--set", "prometheus.url=http://prometheus:9090")
        must("install", "trimtab", CHART, *everywhere, *prometheus, kubeconfig=kubeconfig)
        for team in ("team-a", "team-b"):
            create = [control_plane.tool("kubectl"), f"--kubeconfig={kubeconfig}", "create", "namespace", team]
            subprocess.run(create, check=True, capture_output=True)
        narrow = ("-n", NARROW_NAMESPACE, "--create-namespace", "-f", VALUES / "namespaced.values.yaml")
        must("install", "narrow", CHART, *narrow, "--set", "fullnameOverride=narrow", kubeconfig=kubeconfig)
        yield kubeconfig


@pytest.fixture
async def server(installed: Path) -> AsyncIterator[Cluster]:
    """A connection as administrator."""
    async with await Cluster.connect(str(installed)) as connected:
        yield connected
