"""Pipelines for the clients to call, run as `trimtab up` runs one: two stages that add one each, and one that chats."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.clients.securing import authority, secure
from benchmarks.clients.target import PATIENCE_SECONDS, QUESTION, Target
from benchmarks.router.processes import echo_pipeline, echo_plan
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.envoy.api_keys import new_key

SLOTS = 8
ANSWER: tuple[tuple[str, str, list[int]], ...] = (
    ("text", "BYTES", []),
    ("finish_reason", "BYTES", []),
    ("usage", "INT64", [5]),
)


@asynccontextmanager
async def served(*, secured: bool) -> AsyncIterator[Target]:
    """Serve it on free ports of this machine until the block ends; secured, through TLS and for one API key alone."""
    pipeline = echo_pipeline(len(QUESTION), 0.0, PATIENCE_SECONDS)
    async with _run(pipeline, echo_plan(pipeline, 8, 0.0), secured=secured) as target:
        yield target


@asynccontextmanager
async def served_chats(*, secured: bool) -> AsyncIterator[Target]:
    """Serve a small model with random weights, in the same manner."""
    pipeline = chat_pipeline()
    async with _run(pipeline, chat_plan(pipeline), secured=secured) as target:
        yield target


def chat_pipeline(
    *,
    slots: int = SLOTS,
    slot_tokens: int = 800,
    weights: str = "random://?seed=1",
    family: str = "lmm-digits/colocated",
    **parameters: str,
) -> InferencePipeline:
    """One stage that writes, so many answers side by side."""
    optional = {"messages": False, "options": True, "images": True}
    variant = {
        "name": "tiny",
        "family": family,
        "storageUri": weights,
        "accuracy": 1.0,
        "maxBatchSize": slots,
        "parameters": {"slots": slots, "slot_tokens": slot_tokens, **parameters},
    }
    stage = {
        "name": "answer",
        "role": "Generate",
        "inputs": [{"name": n, "from": f"request.inputs.{n}", "optional": o} for n, o in optional.items()],
        "outputs": [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in ANSWER],
        "batchSizes": [slots],
        "variants": [variant],
    }
    shapes = {"images": [-1]}
    spec = {
        "inputs": [
            {"name": n, "datatype": "BYTES", "shape": shapes.get(n, []), "optional": o} for n, o in optional.items()
        ],
        "outputs": [{"name": name, "from": f"answer.outputs.{name}"} for name, *_ in ANSWER],
        "stages": [stage],
        "slo": {"latency": PATIENCE_SECONDS, "timeToFirstToken": PATIENCE_SECONDS},
        "budget": {"cores": 2},
    }
    return InferencePipeline.model_validate({"kind": "InferencePipeline", "metadata": {"name": "tiny"}, "spec": spec})


def chat_plan(pipeline: InferencePipeline) -> PipelinePlan:
    """Its only variant, in one replica."""
    size = pipeline.spec.stages[0].batch_sizes[0]
    stage = {"name": "answer", "variant": "tiny", "batchSize": size, "replicas": 1, "accuracy": 1.0}
    spec = {"pipeline": pipeline.name, "generation": 1, "createdAt": 0.0, "stages": [stage]}
    return PipelinePlan.model_validate({"metadata": {"name": pipeline.name}, "spec": spec})


@asynccontextmanager
async def _run(pipeline: InferencePipeline, plan: PipelinePlan, *, secured: bool) -> AsyncIterator[Target]:
    with TemporaryDirectory(prefix="trimtab-clients-") as name:
        file, safe = Path(name) / "pipeline.yaml", Path(name) / "safe"
        write_json(file, pipeline)
        key = new_key() if secured else None
        edge = secure(safe, key) if key else None
        async with Supervisor(Setup(file, Path(name) / "run", plan=plan, edge=edge)) as local:
            await local.ready()
            ports = (f"127.0.0.1:{local.rest_port}", f"127.0.0.1:{local.grpc_port}")
            yield Target(*ports, pipeline.name, authority(safe) if key else None, key)
