"""Command line of a replica: prints its ports as one line of JSON once every model is loaded and warmed up.

In a pod, an environment variable holds the models.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TextIO

from pydantic import TypeAdapter, ValidationError

from trimtab_model_servers.errors import ModelError, first_problem
from trimtab_model_servers.server.settings import write_models
from trimtab_model_servers.weights.source import take_credentials
from trimtab_pipelines.edge_settings import ReplicaIdentity
from trimtab_pipelines.kubernetes_names import DATA_PORT, MLSERVER_GRPC_PORT, MLSERVER_HTTP_PORT
from trimtab_pipelines.model_spec import ModelSpec, join_variable
from trimtab_pipelines.processes.child_process import REJECTED, ReplicaPorts, print_ready_line
from trimtab_protocol.mutual_tls import InvalidIdentity, MutualTls

TERMINATION_LOG = Path("/dev/termination-log")
_POD_PORTS = ReplicaPorts(DATA_PORT, MLSERVER_HTTP_PORT, MLSERVER_GRPC_PORT)
_POD_DRAIN_SECONDS = 2.0


def main() -> int:
    arguments = _parser().parse_args()
    ready = _take_output()
    take_credentials()
    default_ports, default_drain_seconds = (
        (_POD_PORTS, _POD_DRAIN_SECONDS) if arguments.models_env else (ReplicaPorts(0, 0, 0), 0)
    )
    custom_ports = {name: number for name in asdict(default_ports) if (number := getattr(arguments, name)) is not None}
    ports = replace(default_ports, **custom_ports)
    drain_seconds = default_drain_seconds if arguments.drain_seconds is None else arguments.drain_seconds
    try:
        with contextlib.ExitStack() as stack:
            folder = (
                stack.enter_context(_model_folder(arguments.models_env)) if arguments.models_env else arguments.folder
            )
            identity = MutualTls(arguments.identity) if arguments.identity else None
            from trimtab_model_servers.server.replica import Listeners, check, run  # noqa: PLC0415  (slow to import)

            listeners = Listeners(
                arguments.host, arguments.mlserver_host, ports, identity, arguments.health_port, arguments.metrics_port
            )
            if arguments.check:
                check(folder)
            else:
                run(folder, partial(_announce, ready), listeners, drain_seconds)
    except (ModelError, InvalidIdentity, OSError) as error:
        _report(f"trimtab_model_servers: {' '.join(str(error).split())}\n")
        return REJECTED if isinstance(error, ModelError) else 1
    return 0


def _take_output() -> TextIO:
    """Return standard output for the ready line; whatever else is printed goes to standard error, as the log does."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def _announce(output: TextIO, ports: ReplicaPorts) -> None:
    print_ready_line(ports, output)
    output.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trimtab_model_servers", description=__doc__)
    models = parser.add_mutually_exclusive_group(required=True)
    models.add_argument("folder", type=Path, nargs="?", help="holds settings.json and NAME/model-settings.json")
    models.add_argument(
        "--models-env", metavar="NAME", help="variable with a JSON list of models, continued in NAME_1, …"
    )
    parser.add_argument("--check", action="store_true", help="load the models, one after the other, and end")
    parser.add_argument("--host", default="127.0.0.1", help="address of the data port (default: %(default)s)")
    parser.add_argument(
        "--mlserver-host",
        default="127.0.0.1",
        help="address of MLServer's own ports, which allow any client to load and unload models (default: %(default)s)",
    )
    parser.add_argument(
        "--identity",
        type=_identity,
        metavar="JSON",
        help="certificate, key, ca and name, as `replicas` of the edge settings: mutual TLS on the data port",
    )
    parser.add_argument("--health-port", type=int, help="plain HTTP port that serves only health")
    parser.add_argument("--metrics-port", type=int, help="plain HTTP port that serves only metrics")
    for name, port in asdict(_POD_PORTS).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, help=f"default: {port} with --models-env, else a free port")
    parser.add_argument(
        "--drain-seconds",
        type=float,
        help="after SIGTERM, serve until no request has arrived for this long "
        f"(default: {_POD_DRAIN_SECONDS:g} with --models-env)",
    )
    return parser


def _identity(text: str) -> ReplicaIdentity:
    try:
        return ReplicaIdentity.model_validate_json(text)
    except ValidationError as error:
        raise argparse.ArgumentTypeError(first_problem(error)) from error


@contextlib.contextmanager
def _model_folder(variable: str) -> Iterator[Path]:
    """Temporary folder with the models of an environment variable."""
    specs = _models(variable)
    with tempfile.TemporaryDirectory(prefix="trimtab-models-") as folder:
        write_models(specs, Path(folder))
        yield Path(folder)


def _models(variable: str) -> list[ModelSpec]:
    text = join_variable(variable, os.environ)
    if not text:
        raise ModelError(f"{variable} is not set; it must hold a JSON list of models")
    try:
        specs = TypeAdapter(list[ModelSpec]).validate_json(text)
    except ValidationError as error:
        raise ModelError(f"{variable}: {first_problem(error)}") from error
    names = [spec.name for spec in specs]
    if not names or len(set(names)) != len(names):
        raise ModelError(f"{variable} must hold at least one model, with unique names; it holds: {names}")
    return specs


def _report(reason: str) -> None:
    """Write the reason to stderr and to Kubernetes' termination log."""
    sys.stderr.write(reason)
    with contextlib.suppress(OSError):
        if TERMINATION_LOG.exists():
            TERMINATION_LOG.write_text(reason)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # everything is closed and flushed; finalizing torch would take seconds
