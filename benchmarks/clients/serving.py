"""A pipeline for the clients to call: two stages that add one each, run as `trimtab up` runs one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.clients.securing import authority, secure
from benchmarks.clients.target import PATIENCE_SECONDS, QUESTION, Target
from benchmarks.router.processes import echo_pipeline, echo_plan
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_pipelines.documents import write_json
from trimtab_router.edge.keys import new_key


@asynccontextmanager
async def served(*, secured: bool) -> AsyncIterator[Target]:
    """Serve it on free ports of this machine until the block ends; secured, through TLS and for one API key alone."""
    pipeline = echo_pipeline(len(QUESTION), 0.0, PATIENCE_SECONDS)
    with TemporaryDirectory(prefix="trimtab-clients-") as name:
        file, safe = Path(name) / "pipeline.yaml", Path(name) / "safe"
        write_json(file, pipeline)
        key = new_key() if secured else None
        edge = secure(safe, key) if key else None
        setup = Setup(file, Path(name) / "run", plan=echo_plan(pipeline, 8, 0.0), edge=edge)
        async with Supervisor(setup) as local:
            await local.ready()
            ports = (f"127.0.0.1:{local.rest_port}", f"127.0.0.1:{local.grpc_port}")
            yield Target(*ports, pipeline.name, authority(safe) if key else None, key)
