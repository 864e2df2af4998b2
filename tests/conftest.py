"""Fixtures shared by tests of several components, and the line of figures that ends a run."""

import os
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.control_plane import api_server, define
from tests.figures import Figures, result_line
from trimtab_kubernetes import Cluster
from trimtab_pipelines.rendering import crd

# How long an example takes says something about the machine, not about the code. The same examples on every machine;
# `--hypothesis-profile explore` draws others.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("steady"), derandomize=False)
settings.load_profile("steady")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--functional", action="store_true", help="ignore thresholds that a busy machine can miss")
    parser.addoption("--minutes", type=float, default=30.0, help="duration of the soak test (default: %(default)s)")
    parser.addoption("--requests", type=int, default=2000, help="random requests of each kind (default: %(default)s)")


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Figures that the run reports for this test."""
    node = request.node
    return Figures(node.name, node.user_properties, functional=request.config.getoption("--functional"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the run with one line of JSON if tests reported figures."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    line = None if reporter is None else result_line(config.getoption("-m"), reporter.stats)
    if line is not None:
        line.print()


@pytest.fixture(scope="session")
def kubeconfig() -> Iterator[Path]:
    """The kubeconfig of a real API server: where TRIMTAB_TEST_KUBECONFIG points, else one of our own, without nodes."""
    given = os.environ.get("TRIMTAB_TEST_KUBECONFIG")
    if given:
        yield Path(given)
        return
    with api_server() as path:
        yield path


@pytest.fixture
async def cluster(kubeconfig: Path) -> AsyncIterator[Cluster]:
    """A connection as administrator, with our kinds defined."""
    async with await Cluster.connect(str(kubeconfig)) as connected:
        await define(connected, *crd.render())
        yield connected


@pytest.fixture
async def namespace(cluster: Cluster) -> AsyncIterator[str]:
    name = f"test-{uuid.uuid4().hex[:10]}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    await cluster.create(body, manager="tests")
    yield name
    await cluster.delete("Namespace", None, name)
