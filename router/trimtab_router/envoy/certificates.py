"""Where the door finds its certificates, and by what it notices new ones. Pure.

Envoy reads certificates anew only where they are told of in a file of their own (its secret discovery), and looks when
something is moved into their folder: a file renamed over the old one, or the link `..data` of a mounted Secret. What is
written into a file in place moves nothing, and is not noticed.
"""

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from trimtab_pipelines.edge_settings import Tls

Json = dict[str, Any]

SECRET_KIND = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"  # noqa: S105 - a kind
_DOOR, _CALLERS = "door", "callers"


def context(tls: Tls, folder: Path) -> Json:
    """The fields of a listener's TLS context; in the folder are the files that `discovered` returns."""
    common: Json = {
        "alpn_protocols": ["h2", "http/1.1"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "tls_certificate_sds_secret_configs": [_told_in(folder, _DOOR)],
    }
    if tls.client_ca is None:
        return {"common_tls_context": common}
    common["validation_context_sds_secret_config"] = _told_in(folder, _CALLERS)
    return {"common_tls_context": common, "require_client_certificate": True}


def discovered(tls: Tls) -> Mapping[str, Json]:
    """By name the files that tell Envoy which files to read and which folders to watch, one for each secret."""
    door = {
        "certificate_chain": {"filename": tls.certificate},
        "private_key": {"filename": tls.key},
        "watched_directory": _folder_of(tls.certificate),
    }
    files = {_file(_DOOR): _resource(_DOOR, "tls_certificate", door)}
    if tls.client_ca is not None:
        callers = {"trusted_ca": {"filename": tls.client_ca}, "watched_directory": _folder_of(tls.client_ca)}
        files[_file(_CALLERS)] = _resource(_CALLERS, "validation_context", callers)
    return files


def _told_in(folder: Path, name: str) -> Json:
    source = {"path_config_source": {"path": str(folder / _file(name))}, "resource_api_version": "V3"}
    return {"name": name, "sds_config": source}


def _resource(name: str, field: str, content: Json) -> Json:
    return {"resources": [{"@type": SECRET_KIND, "name": name, field: content}]}


def _file(name: str) -> str:
    return f"certificates-{name}.json"


def _folder_of(file: str) -> Json:
    return {"path": str(PurePath(file).parent)}
