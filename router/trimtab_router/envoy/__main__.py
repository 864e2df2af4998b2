"""`python -m trimtab_router.envoy`: executes the Envoy of one router."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trimtab_pipelines.documents import DocumentError, load_edge, load_pipeline
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.envoy.process import command, find_binary, write_config
from trimtab_router.envoy.sockets import SocketFolder, Sockets
from trimtab_router.limits import payload_bytes
from trimtab_router.observability.tracing import ENDPOINT_VARIABLE, collector_address


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the configuration and execute Envoy. Exit code 2 for invalid settings or without an Envoy binary."""
    options = _parser().parse_args(arguments)
    try:
        settings = load_edge(options.edge)
        pipeline = load_pipeline(options.pipeline)
        envoy = find_binary()
        socket_folder = _socket_folder(options, pipeline, settings)
        otlp = collector_address(os.environ.get(ENDPOINT_VARIABLE))
        config = write_config(settings, socket_folder, pipeline=pipeline.name, otlp=otlp)
    except (DocumentError, FileNotFoundError) as error:
        sys.stderr.write(f"trimtab_router.envoy: {error}\n")
        return 2
    os.execv(envoy, command(envoy, "--config-path", str(config)))  # noqa: S606 - the program of a locked package
    return 1


def _socket_folder(options: argparse.Namespace, pipeline: InferencePipeline, settings: EdgeSettings) -> SocketFolder:
    max_bytes, chats = payload_bytes(pipeline, settings), pipeline.spec.chat_settings is not None
    return SocketFolder(
        Sockets(options.sockets),
        options.host,
        options.rest_port,
        options.grpc_port,
        max_payload_bytes=max_bytes,
        chats=chats,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trimtab_router.envoy", description=__doc__)
    parser.add_argument("--pipeline", type=Path, required=True, help="pipeline.yaml or its folder")
    parser.add_argument("--sockets", type=Path, required=True, help="folder of the sockets shared with the router")
    parser.add_argument("--edge", type=Path, help="settings of the proxy (edge.yaml)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--rest-port", type=int, default=0, help="0 lets the system choose")
    parser.add_argument("--grpc-port", type=int, default=0, help="0 lets the system choose")
    return parser


if __name__ == "__main__":
    sys.exit(main())
