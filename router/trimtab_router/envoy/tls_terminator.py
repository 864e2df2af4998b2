"""What Envoy is told that stands before a server not of ours, which has no certificate to show: TLS ends here. Pure.

It takes only who shows a certificate of the authority, as our own model servers do, and passes bytes on as they come.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab_pipelines.edge_settings import Identity, Tls
from trimtab_router.envoy import certificates
from trimtab_router.envoy.http_filters import address, typed

Json = dict[str, Any]
_SERVED = "served"


def terminator_bootstrap(identity: Identity, *, port: int, served_port: int, folder: Path) -> Json:
    """Envoy's whole configuration.

    Args:
        identity: the certificate to show, and whom to let in.
        port: where routers come in.
        served_port: the server's, on loopback.
        folder: where the files are that `told` returns.
    """
    proxy = typed(
        "envoy.filters.network.tcp_proxy",
        "envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
        stat_prefix="guard",
        cluster=_SERVED,
        idle_timeout="0s",  # a router's connections wait for its next batch, however long that takes
    )
    listener = {
        "name": "guard",
        "address": address("0.0.0.0", port),  # noqa: S104
        "filter_chains": [
            {
                "filters": [proxy],
                "transport_socket_connect_timeout": "10s",
                "transport_socket": typed(
                    "envoy.transport_sockets.tls",
                    "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
                    require_client_certificate=True,
                    disable_stateless_session_resumption=True,  # none outlives the trust in who began it
                    disable_stateful_session_resumption=True,
                    common_tls_context=_context(identity, folder),
                ),
            }
        ],
    }
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address("127.0.0.1", served_port)}}]}]
    served = {
        "name": _SERVED,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": _SERVED, "endpoints": endpoints},
    }
    return {
        "node": {"id": "guard", "cluster": "trimtab"},
        "static_resources": {"listeners": [listener], "clusters": [served]},
    }


def certificate_files(identity: Identity) -> Mapping[str, Json]:
    """By name the files that tell Envoy where its certificates are, as `certificates.discovered` says."""
    return certificates.discovered(_tls(identity))


def _context(identity: Identity, folder: Path) -> Json:
    common: Json = certificates.context(_tls(identity), folder)["common_tls_context"]
    del common["alpn_protocols"]
    common["tls_params"] = {"tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_3"}
    if identity.name:
        kind = "URI" if ":" in identity.name else "DNS"
        borne = {"match_typed_subject_alt_names": [{"san_type": kind, "matcher": {"exact": identity.name}}]}
        common["combined_validation_context"] = {
            "default_validation_context": borne,
            "validation_context_sds_secret_config": common.pop("validation_context_sds_secret_config"),
        }
    return common


def _tls(identity: Identity) -> Tls:
    return Tls(certificate=identity.certificate, key=identity.key, client_ca=identity.ca)
