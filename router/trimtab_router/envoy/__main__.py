"""`python -m trimtab_router.envoy`: becomes the Envoy in front of one router."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trimtab_pipelines.documents import DocumentError, load_edge, load_pipeline
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.envoy import config_files
from trimtab_router.envoy.binary import command, find_binary
from trimtab_router.envoy.memory_limits import payload_bytes
from trimtab_router.envoy.sockets import SocketFolder, Sockets
from trimtab_router.observability.tracing import ENDPOINT_VARIABLE, collector


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the configuration and become Envoy; exit code 2 for settings that cannot be used, or without an Envoy."""
    given = _parser().parse_args(arguments)
    try:
        settings = load_edge(given.edge)
        pipeline = load_pipeline(given.pipeline)
        envoy = find_binary()
        doorstep = _doorstep(given, pipeline, settings)
        config = config_files.write(settings, doorstep, pipeline=pipeline.name, otlp=_otlp())
    except (DocumentError, FileNotFoundError) as error:
        sys.stderr.write(f"trimtab_router.envoy: {error}\n")
        return 2
    os.execv(envoy, command(envoy, "--config-path", str(config)))  # noqa: S606 - the program of a locked package
    return 1


def _doorstep(given: argparse.Namespace, pipeline: InferencePipeline, settings: EdgeSettings) -> SocketFolder:
    most_bytes, chats = payload_bytes(pipeline, settings), pipeline.spec.chats is not None
    return SocketFolder(
        Sockets(given.sockets), given.host, given.rest_port, given.grpc_port, max_payload_bytes=most_bytes, chats=chats
    )


def _otlp() -> str | None:
    return collector(os.environ.get(ENDPOINT_VARIABLE))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trimtab_router.envoy", description=__doc__)
    parser.add_argument("--pipeline", type=Path, required=True, help="pipeline.yaml or its folder")
    parser.add_argument("--sockets", type=Path, required=True, help="folder of the sockets shared with the router")
    parser.add_argument("--edge", type=Path, help="settings of the door")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--rest-port", type=int, default=0, help="0 lets the system choose")
    parser.add_argument("--grpc-port", type=int, default=0, help="0 lets the system choose")
    return parser


if __name__ == "__main__":
    sys.exit(main())
