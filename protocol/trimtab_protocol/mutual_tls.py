"""Mutual TLS between routers and replicas, with certificates that may be replaced at any time.

TLS 1.3 only, without session tickets, so that no session outlives the trust in its peer. Peers are verified by a
certificate authority and optionally by a name, not by address, since pod addresses change.
"""

import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab_pipelines.edge_settings import ReplicaIdentity
from trimtab_protocol.sanitize import printable

log = logging.getLogger(__name__)

FileVersions = tuple[tuple[int, int, int], ...]
"""Inode, size and modification time of each file."""
_NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"}


class InvalidIdentity(ValueError):
    """The certificate files are invalid; the message names them."""


@dataclass(frozen=True, slots=True)
class _Contexts:
    client: ssl.SSLContext
    server: ssl.SSLContext


class MutualTls:
    """TLS contexts for both sides, reloaded when the files change. Raises InvalidIdentity if the files are invalid."""

    def __init__(self, identity: ReplicaIdentity) -> None:
        self._identity = identity
        self._versions = _file_versions(identity)
        self._contexts = self._load()
        self._refusals: set[str] = set()

    def client_context(self) -> ssl.SSLContext:
        """Context for a new connection; the same object while the files are unchanged."""
        return self._current().client

    def server_context(self) -> ssl.SSLContext:
        """Context of a listener; each connection uses the files current at that time."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.sni_callback = self._use_current
        return context

    def _use_current(self, peer: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        peer.context = self._current().server  # includes the authorities used for verification

    def _current(self) -> _Contexts:
        versions = _file_versions(self._identity)
        if versions != self._versions:
            self._versions = versions
            try:
                self._contexts = self._load()
            except InvalidIdentity as error:  # the files may be being written
                log.warning("%s; keeping the previous certificate", error)
            else:
                self._refusals.clear()
                log.info("%s: certificate reloaded", self._identity.certificate)
        return self._contexts

    def _load(self) -> _Contexts:
        return _Contexts(self._context(ssl.PROTOCOL_TLS_CLIENT), self._context(ssl.PROTOCOL_TLS_SERVER))

    def _context(self, side: int) -> ssl.SSLContext:
        files, context = self._identity, ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # allows intermediate authorities as trust anchors
        if side == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        context.sslobject_class = _peer_check(
            files.name, self._log_refusal if side == ssl.PROTOCOL_TLS_SERVER else _quiet
        )
        try:
            context.load_cert_chain(files.certificate, files.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise InvalidIdentity(f"identity: certificate {files.certificate} with key {files.key}: {error}") from error
        try:
            context.load_verify_locations(files.ca)
        except (OSError, ValueError) as error:
            raise InvalidIdentity(f"identity: ca {files.ca}: {error}") from error
        return context

    def _log_refusal(self, error: ssl.SSLError) -> None:
        """Log why a connection was refused; each reason once, since any client may cause it."""
        reason = explain_ssl_error(error)
        if reason not in self._refusals:
            self._refusals.add(reason)
            log.warning("connection refused: %s", reason)


def explain_ssl_error(error: OSError) -> str:
    """Describe why a TLS connection failed, from the peer's point of view."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {getattr(error, 'verify_message', '') or error}"
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        return "it does not use TLS"
    return str(error.strerror or error)


def certificate_names(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    names = (certificate or {}).get("subjectAltName", ())
    return tuple(name for kind, name in names if kind in {"DNS", "URI"})


def _peer_check(required_name: str, on_refusal: Callable[[ssl.SSLError], None]) -> type[ssl.SSLObject]:
    """SSLObject class that also verifies the peer's name and reports refusals."""

    class CheckedSsl(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
                self._check_name()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                on_refusal(error)
                raise

        def _check_name(self) -> None:
            names = certificate_names(self.getpeercert())
            if required_name and required_name not in names:
                raise ssl.SSLCertVerificationError(
                    f"it is for {printable(', '.join(names), 200) or 'no name'}, not for {required_name}"
                )

    return CheckedSsl


def _quiet(_: ssl.SSLError) -> None:
    """Ignore refusals; clients get the exception."""


def _file_versions(identity: ReplicaIdentity) -> FileVersions | None:
    try:
        stats = [Path(file).stat() for file in (identity.certificate, identity.key, identity.ca)]
    except OSError:
        return None
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a password")
