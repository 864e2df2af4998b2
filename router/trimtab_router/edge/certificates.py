"""Where the door finds its certificates, and by what it notices new ones. Pure.

Envoy reads certificates anew only where they are told of in a file of their own (its secret discovery), and looks when
something is moved into their folder: a file renamed over the old one, or the link `..data` of a mounted Secret. What is
written into a file in place moves nothing, and is not noticed.
"""

from pathlib import Path, PurePath
from typing import Any

from trimtab_pipelines.edge import Tls

Json = dict[str, Any]

SECRET_KIND = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.Secret"  # noqa: S105 - a kind
_DOOR, _CALLERS = "door", "callers"


def context(tls: Tls, told_in: Path) -> Json:
    """The fields of a listener's TLS context; `told_in` is the file with what `discovered` returns."""
    source = {"path_config_source": {"path": str(told_in)}, "resource_api_version": "V3"}
    common: Json = {
        "alpn_protocols": ["h2", "http/1.1"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "tls_certificate_sds_secret_configs": [{"name": _DOOR, "sds_config": source}],
    }
    if tls.client_ca is None:
        return {"common_tls_context": common}
    common["validation_context_sds_secret_config"] = {"name": _CALLERS, "sds_config": source}
    return {"common_tls_context": common, "require_client_certificate": True}


def discovered(tls: Tls) -> Json:
    """What Envoy reads to know which files to read, and which folders to watch."""
    door = {
        "certificate_chain": {"filename": tls.certificate},
        "private_key": {"filename": tls.key},
        "watched_directory": _folder_of(tls.certificate),
    }
    secrets: list[Json] = [{"@type": SECRET_KIND, "name": _DOOR, "tls_certificate": door}]
    if tls.client_ca is not None:
        callers = {"trusted_ca": {"filename": tls.client_ca}, "watched_directory": _folder_of(tls.client_ca)}
        secrets.append({"@type": SECRET_KIND, "name": _CALLERS, "validation_context": callers})
    return {"resources": secrets}


def _folder_of(file: str) -> Json:
    return {"path": str(PurePath(file).parent)}
