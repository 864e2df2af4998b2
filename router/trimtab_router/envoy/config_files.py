"""Shell: writes what Envoy reads when it starts, after a look at the files that it is to read itself."""

import json
import ssl
from pathlib import Path

from trimtab_pipelines.documents import DocumentError, write_atomically
from trimtab_pipelines.edge_settings import EdgeSettings, Tls
from trimtab_router.envoy.bootstrap import bootstrap
from trimtab_router.envoy.certificates import discovered
from trimtab_router.envoy.sockets import SocketFolder


def write(settings: EdgeSettings, doorstep: SocketFolder, *, pipeline: str, otlp: str | None = None) -> Path:
    """Write Envoy's configuration beside the sockets, and return its file; the arguments are those of `bootstrap`.

    Raises:
        DocumentError: a certificate cannot be used; Envoy would start, and refuse every connection.
    """
    folder = doorstep.sockets.folder
    if settings.tls is not None:
        check(settings.tls)
        for name, content in discovered(settings.tls).items():
            (doorstep.told_in / name).write_text(json.dumps(content))
    write_atomically(doorstep.sockets.pressure, "0")  # Envoy does not start without it
    file = folder / "envoy.json"
    file.write_text(json.dumps(bootstrap(settings, doorstep, pipeline=pipeline, otlp=otlp)))
    return file


def check(tls: Tls) -> None:
    """Raise DocumentError, naming the files, where a certificate, its key or the callers' authority cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.certificate, tls.key, password=_no_password)
    except (OSError, ValueError) as error:
        raise DocumentError(f"tls: certificate {tls.certificate} with key {tls.key}: {error}") from error
    if tls.client_ca is not None:
        try:
            context.load_verify_locations(tls.client_ca)
        except (OSError, ValueError) as error:
            raise DocumentError(f"tls: clientCa {tls.client_ca}: {error}") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a password")
