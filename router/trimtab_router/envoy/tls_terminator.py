"""Envoy that terminates TLS in front of a third-party model server.

It accepts only clients with a certificate of the authority, as our own model servers do, and forwards bytes unchanged.
"""

from collections.abc import Mapping
from pathlib import Path

from trimtab_pipelines.edge_settings import EdgeTls, ReplicaIdentity
from trimtab_router.envoy import certificates
from trimtab_router.envoy.http_filters import Json, address, static_cluster, typed

_SERVER = "server"


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
    return certificates.discovery_files(_tls(identity))


def _context(identity: ReplicaIdentity, folder: Path) -> Json:
    common: Json = certificates.context(_tls(identity), folder)["common_tls_context"]
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
