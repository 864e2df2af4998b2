"""A pipeline for the clients to call: two stages that add one each, run as `trimtab up` runs one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.clients.target import PATIENCE_SECONDS, QUESTION, Target
from benchmarks.router.processes import echo_pipeline, echo_plan
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_pipelines.documents import write_json


@asynccontextmanager
async def served() -> AsyncIterator[Target]:
    """Serve it on free ports of this machine, without TLS and keys, until the block ends."""
    pipeline = echo_pipeline(len(QUESTION), 0.0, PATIENCE_SECONDS)
    with TemporaryDirectory(prefix="trimtab-clients-") as name:
        file = Path(name) / "pipeline.yaml"
        write_json(file, pipeline)
        setup = Setup(file, Path(name) / "run", plan=echo_plan(pipeline, 8, 0.0))
        async with Supervisor(setup) as local:
            await local.ready()
            yield Target(f"127.0.0.1:{local.rest_port}", f"127.0.0.1:{local.grpc_port}", pipeline.name)
