"""TLS certificates of Envoy, reloaded when they change.

Envoy reloads certificates only if a file of its own names them (secret discovery), and only when something is moved
into their folder: a renamed file, or the `..data` link of a mounted Secret. A file rewritten in place is not noticed.
"""

from collections.abc import Mapping
from pathlib import Path, PurePath

from trimtab_pipelines.edge_settings import EdgeTls
from trimtab_router.envoy.http_filters import Json

SECRET_KIND = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"  # noqa: S105 - a kind
_SERVER, _CLIENTS = "server", "clients"


def context(tls: EdgeTls, folder: Path) -> Json:
    """Fields of a listener's TLS context. The folder holds the files of `discovery_files`."""
    common: Json = {
        "alpn_protocols": ["h2", "http/1.1"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "tls_certificate_sds_secret_configs": [_sds_config(folder, _SERVER)],
    }
    if tls.client_ca is None:
        return {"common_tls_context": common}
    common["validation_context_sds_secret_config"] = _sds_config(folder, _CLIENTS)
    return {"common_tls_context": common, "require_client_certificate": True}


def discovery_files(tls: EdgeTls) -> Mapping[str, Json]:
    """Contents by name of the files that name the certificates and the folders to watch, one for each secret."""
    server = {
        "certificate_chain": {"filename": tls.certificate},
        "private_key": {"filename": tls.key},
        "watched_directory": _folder_of(tls.certificate),
    }
    files = {_file(_SERVER): _resource(_SERVER, "tls_certificate", server)}
    if tls.client_ca is not None:
        clients = {"trusted_ca": {"filename": tls.client_ca}, "watched_directory": _folder_of(tls.client_ca)}
        files[_file(_CLIENTS)] = _resource(_CLIENTS, "validation_context", clients)
    return files


def _sds_config(folder: Path, name: str) -> Json:
    source = {"path_config_source": {"path": str(folder / _file(name))}, "resource_api_version": "V3"}
    return {"name": name, "sds_config": source}


def _resource(name: str, field: str, content: Json) -> Json:
    return {"resources": [{"@type": SECRET_KIND, "name": name, field: content}]}


def _file(name: str) -> str:
    return f"certificates-{name}.json"


def _folder_of(file: str) -> Json:
    return {"path": str(PurePath(file).parent)}
