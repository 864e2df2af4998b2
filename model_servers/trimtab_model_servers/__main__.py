"""One replica on the command line: prints its ports as one line of JSON once every model is loaded and warmed.

In a pod the models stand in an environment variable, so that a pod differs from another only where what it serves does.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from trimtab_model_servers.credentials import take_credentials
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.settings import write_models
from trimtab_pipelines.edge_settings import Identity
from trimtab_pipelines.kubernetes_names import DATA_PORT, MLSERVER_GRPC_PORT, MLSERVER_HTTP_PORT
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.processes.ready_line import ReplicaPorts, print_ready_line
from trimtab_protocol.mutual_tls import MutualTls, UnusableIdentity

TERMINATION_LOG = Path("/dev/termination-log")
_POD_PORTS = ReplicaPorts(DATA_PORT, MLSERVER_HTTP_PORT, MLSERVER_GRPC_PORT)
_POD_DRAIN_SECONDS = 2.0


def main() -> int:
    """Serve until SIGTERM; return the process's exit code."""
    given = _parser().parse_args()
    take_credentials()
    default_ports, default_drain_seconds = (
        (_POD_PORTS, _POD_DRAIN_SECONDS) if given.models_env else (ReplicaPorts(0, 0, 0), 0)
    )
    asked = {name: number for name in asdict(default_ports) if (number := getattr(given, name)) is not None}
    ports = replace(default_ports, **asked)
    drain_seconds = default_drain_seconds if given.drain_seconds is None else given.drain_seconds
    try:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(_written(given.models_env)) if given.models_env else given.folder
            identity = MutualTls(given.identity) if given.identity else None
            from trimtab_model_servers.server import run  # noqa: PLC0415  (imports torch, in vain if this fails)

            run(
                folder,
                print_ready_line,
                address=given.host,
                plain_address=given.mlserver_host,
                ports=ports,
                drain_seconds=drain_seconds,
                identity=identity,
                health_port=given.health_port,
                metrics_port=given.metrics_port,
            )
    except (ModelError, UnusableIdentity, OSError) as error:
        _report(f"trimtab_model_servers: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trimtab_model_servers", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("folder", type=Path, nargs="?", help="holds settings.json and NAME/model-settings.json")
    what.add_argument("--models-env", metavar="NAME", help="environment variable with a JSON list of models")
    parser.add_argument("--host", default="127.0.0.1", help="address of the data port (default: %(default)s)")
    parser.add_argument(
        "--mlserver-host",
        default="127.0.0.1",
        help="address of MLServer's own ports, where anybody may load and unload models (default: %(default)s)",
    )
    parser.add_argument(
        "--identity",
        type=_identity,
        metavar="JSON",
        help="certificate, key, ca and name as `replicas` of the door's settings has them: TLS alone at the data port",
    )
    parser.add_argument("--health-port", type=int, help="plain HTTP that says if it is alive and ready, and no more")
    parser.add_argument("--metrics-port", type=int, help="plain HTTP that says what chats hold and did, and no more")
    for name, port in asdict(_POD_PORTS).items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, help=f"default: {port} with --models-env, else a free one")
    parser.add_argument(
        "--drain-seconds",
        type=float,
        help=f"after SIGTERM, serve until nothing came for so long (default: {_POD_DRAIN_SECONDS:g} with --models-env)",
    )
    return parser


def _identity(written: str) -> Identity:
    try:
        return Identity.model_validate_json(written)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise argparse.ArgumentTypeError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error


@contextlib.contextmanager
def _written(variable: str) -> Iterator[Path]:
    """The models of an environment variable as a folder, for as long as it is needed."""
    specs = _models(variable)
    with tempfile.TemporaryDirectory(prefix="trimtab-models-") as written:
        write_models(specs, Path(written))
        yield Path(written)


def _models(variable: str) -> list[ModelSpec]:
    text = os.environ.get(variable)
    if not text:
        raise ModelError(f"{variable} is not set; it must hold a JSON list of models")
    try:
        specs = TypeAdapter(list[ModelSpec]).validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise ModelError(f"{variable}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error
    names = [spec.name for spec in specs]
    if not names or len(set(names)) != len(names):
        raise ModelError(f"{variable} must hold at least one model, each of a name of its own; it holds: {names}")
    return specs


def _report(reason: str) -> None:
    """Say why it ends, also where Kubernetes looks for a container's last words."""
    sys.stderr.write(reason)
    with contextlib.suppress(OSError):
        if TERMINATION_LOG.exists():
            TERMINATION_LOG.write_text(reason)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # all is closed and written by now; taking torch apart would keep whoever waits for seconds
