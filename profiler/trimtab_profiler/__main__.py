"""Entry point of profile Jobs: `python -m trimtab_profiler --cluster --pipeline FILE …`."""

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from trimtab_kubernetes import Cluster, ClusterError
from trimtab_model_servers.weights.source import take_credentials
from trimtab_pipelines.documents import DocumentError, load_pipeline
from trimtab_pipelines.errors import UserError
from trimtab_pipelines.spec import InferencePipeline
from trimtab_profiler.kubernetes_job import TaskError, run_task
from trimtab_profiler.replica import ProfileError

PIPELINES = Path("/opt/trimtab/pipelines")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the profiles of one task; on failure return 1 with the reason on the last line of stderr."""
    options = _parse(arguments)
    take_credentials()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s profiler %(levelname)s %(message)s", stream=sys.stderr)
    try:
        pipeline = load_pipeline(options.pipeline).with_metadata(namespace=options.namespace)
    except DocumentError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    problem = asyncio.run(_run(pipeline, options.folder or PIPELINES / pipeline.name, options.task))
    if problem:
        sys.stderr.write(f"{problem}\n")
    return 1 if problem else 0


async def _run(pipeline: InferencePipeline, folder: Path, task: str) -> str:
    try:
        async with await Cluster.connect() as cluster:
            await run_task(cluster, pipeline, folder, task)
    except (ClusterError, ProfileError, UserError, TaskError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("trimtab_profiler", description="Measures a pipeline's variants in a cluster.")
    parser.add_argument("--cluster", action="store_true", required=True, help="write ModelProfiles to the cluster")
    parser.add_argument("--pipeline", type=Path, required=True, help="InferencePipeline, a file or its folder")
    parser.add_argument("--namespace", required=True, help="namespace of the pipeline")
    parser.add_argument("--task", required=True, help="profile task")
    parser.add_argument("--folder", type=Path, help=f"base of relative storageUris; default {PIPELINES}/NAME")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
