"""TLS certificates of Envoy, reloaded when they change.

Envoy reloads certificates only if a file of its own names them (secret discovery), and only when something is moved
into their folder: a renamed file, or the `..data` link of a mounted Secret. A file rewritten in place is not noticed.
An Envoy terminates TLS in front of a third-party model server: it accepts only certificates of the authority.
"""

from collections.abc import Mapping
from pathlib import Path, PurePath

from trimtab_pipelines.edge_settings import EdgeTls, ReplicaIdentity
from trimtab_router.envoy.http_filters import Json, address, static_cluster, typed

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


def terminator_bootstrap(identity: ReplicaIdentity, *, port: int, served_port: int, folder: Path) -> Json:
    """Envoy's complete configuration. `port` is for routers, `served_port` that of the server on loopback."""
    proxy = typed(
        "envoy.filters.network.tcp_proxy",
        "envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
        stat_prefix="terminator",
        cluster=_SERVER,
        idle_timeout="0s",  # a router's connections stay open between batches
    )
    listener = {
        "name": "terminator",
        "address": address("0.0.0.0", port),  # noqa: S104
        "filter_chains": [
            {
                "filters": [proxy],
                "transport_socket_connect_timeout": "10s",
                "transport_socket": typed(
                    "envoy.transport_sockets.tls",
                    "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
                    require_client_certificate=True,
                    disable_stateless_session_resumption=True,  # a session must not outlive the trust in its client
                    disable_stateful_session_resumption=True,
                    common_tls_context=_context(identity, folder),
                ),
            }
        ],
    }
    server_cluster = static_cluster(_SERVER, address("127.0.0.1", served_port))
    return {
        "node": {"id": "terminator", "cluster": "trimtab"},
        "static_resources": {"listeners": [listener], "clusters": [server_cluster]},
    }


def certificate_files(identity: ReplicaIdentity) -> Mapping[str, Json]:
    return discovery_files(_tls(identity))


def _context(identity: ReplicaIdentity, folder: Path) -> Json:
    common: Json = context(_tls(identity), folder)["common_tls_context"]
    del common["alpn_protocols"]
    common["tls_params"] = {"tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_3"}
    if identity.name:
        kind = "URI" if ":" in identity.name else "DNS"
        name_match = {"match_typed_subject_alt_names": [{"san_type": kind, "matcher": {"exact": identity.name}}]}
        common["combined_validation_context"] = {
            "default_validation_context": name_match,
            "validation_context_sds_secret_config": common.pop("validation_context_sds_secret_config"),
        }
    return common


def _tls(identity: ReplicaIdentity) -> EdgeTls:
    return EdgeTls(certificate=identity.certificate, key=identity.key, client_ca=identity.ca)
