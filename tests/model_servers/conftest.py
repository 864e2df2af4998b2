"""Real replicas, forked from a process that has imported torch and MLServer once."""

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from tests.fakes.hub import Hub, hub
from tests.fakes.object_store import ObjectStore, object_store
from trimtab_model_servers.server.settings import write_model_folder
from trimtab_pipelines.processes.child_process import ReplicaPorts


@dataclass(frozen=True, slots=True)
class Replica:
    """A running replica."""

    ports: ReplicaPorts
    process: ForkServerProcess

    def terminate(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGTERM)


def run_tied(target: Callable[[str, Connection], None], folder: str, connection: Connection) -> None:
    """Run a replica that ends with the tests: it holds the forkserver open, which would outlive them too."""
    threading.Thread(target=_end_with_tests, daemon=True).start()
    target(folder, connection)


def _end_with_tests() -> None:
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os.kill(os.getpid(), signal.SIGKILL)


def serve(folder: str, connection: Connection) -> None:
    """Run a replica in the forked child; send its ports, or why it cannot serve."""
    from trimtab_model_servers.errors import ModelError  # noqa: PLC0415  (imported in the forkserver)
    from trimtab_model_servers.server.replica import run  # noqa: PLC0415

    try:
        run(Path(folder), connection.send)
    except ModelError as error:
        connection.send(str(error))


class Gate:
    """Takes the place of `time` in the echo, which sleeps as long as it is shut; both sides tell by files."""

    def __init__(self, folder: Path) -> None:
        self._begun, self._shut = folder / "begun", folder / "shut"

    def sleep(self, _: float) -> None:
        self._begun.touch()
        while self._shut.exists():
            time.sleep(0.005)

    def shut(self) -> None:
        """Let no batch be done that begins from now on."""
        self._shut.touch()
        self._begun.unlink(missing_ok=True)

    async def begun(self) -> None:
        while not self._begun.exists():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.005)

    def open(self) -> None:
        self._shut.unlink()


def serve_gated(folder: str, connection: Connection) -> None:
    """Run a replica whose slow model computes until its gate is opened."""
    from trimtab_model_servers.families import echo  # noqa: PLC0415  (imported in the forkserver)

    vars(echo)["time"] = Gate(Path(folder))
    serve(folder, connection)


def write_echoes(folder: Path) -> Path:
    """Write a stage of three echoes: one quick, one that a gate may stop, one with two operating points."""
    tensor = {"datatype": "FP32", "shape": [-1]}
    points = [{"name": "full", "accuracy": 0.9}, {"name": "less", "accuracy": 0.8}]
    variants = [
        a_variant("quick", maxBatchSize=8),
        a_variant("slow", maxBatchSize=8, parameters={"delay_seconds": 0.1}),
        a_variant("pointed", maxBatchSize=8, operatingPoints=points),
    ]
    stage = a_stage(outputs=[{"name": "y"} | tensor], variants=variants)
    pipeline = a_pipeline([stage], inputs=[{"name": "x"} | tensor])
    write_model_folder(pipeline, folder, "first", ["quick", "slow", "pointed"], folder, cores=1)
    return folder


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., Replica | str]]:
    """Start replicas; end those that still run with the tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trimtab_model_servers.server.replica", "trimtab_model_servers.families.echo"])
    started: list[ForkServerProcess] = []

    def _start(folder: Path, target: Callable[[str, Connection], None] = serve) -> Replica | str:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=run_tied, args=(target, str(folder), theirs))
        process.start()
        started.append(process)
        theirs.close()
        answer = ours.recv()
        ours.close()
        return answer if isinstance(answer, str) else Replica(answer, process)

    yield _start
    for process in started:
        process.kill()
        process.join()


@pytest.fixture(scope="session")
def replica(start: Callable[[Path], Replica], tmp_path_factory: pytest.TempPathFactory) -> Replica:
    """A replica of three echoes, for all tests that leave it running."""
    running = start(write_echoes(tmp_path_factory.mktemp("echoes")))
    assert isinstance(running, Replica), running
    return running


@pytest.fixture
def weights_cache(monkeypatch, tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRIMTAB_WEIGHTS_CACHE", str(folder))
    return folder


@pytest.fixture
def running_hub(monkeypatch, weights_cache: Path) -> Iterator[Hub]:
    """A Hugging Face Hub on loopback, which its client uses."""
    with hub() as running:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", running.endpoint)
        template = f"{running.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield running


@pytest.fixture
def store(monkeypatch, weights_cache: Path) -> Iterator[ObjectStore]:
    """An object store on loopback, with credentials in the environment."""
    with object_store() as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield running
