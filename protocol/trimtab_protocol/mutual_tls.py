"""Mutual TLS between routers and replicas, with certificates that may be replaced at any time.

TLS 1.3 only, without session tickets, so that no session outlives the trust in its peer. Peers are verified by a
certificate authority and optionally by a name, not by address, since pod addresses change.
"""

import logging
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trimtab_pipelines.edge_settings import ReplicaIdentity
from trimtab_protocol.sanitize import printable

log = logging.getLogger(__name__)

FileVersions = tuple[tuple[int, int, int], ...]
"""Inode, size and modification time of each file."""
_NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"}


_PEM_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME, _LONG_FORM = 0xA0, 0x17, 0x80  # tags of DER elements, and the flag of a length of several bytes
_VALIDITY = 3  # field after serial number, algorithm and issuer; the version before them is optional


class InvalidIdentity(ValueError):
    """The certificate files are invalid; the message names them."""


@dataclass(frozen=True, slots=True)
class _Contexts:
    client: ssl.SSLContext
    server: ssl.SSLContext
    authorities: Sequence[bytes]
    refusal: str
    """Why the authorities refuse the certificate itself; empty if they accept it."""


class MutualTls:
    """TLS contexts for both sides, reloaded when the files change. Raises InvalidIdentity if the files are invalid.

    Invalid files do not replace valid ones, nor does a certificate that the unchanged authorities refuse, as an expired
    one, replace one that they accepted.
    """

    def __init__(self, identity: ReplicaIdentity) -> None:
        self._identity = identity
        self._versions = _file_versions(identity)
        self._refusals: set[str] = set()
        self._contexts = self._load()

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
                self._contexts = self._accept(self._load())
            except InvalidIdentity as error:  # the files may be being written
                log.warning("%s; keeping the previous certificate", error)
            else:
                self._refusals.clear()
                log.info("%s: certificate reloaded", self._identity.certificate)
        return self._contexts

    def _accept(self, contexts: _Contexts) -> _Contexts:
        previous = self._contexts
        if contexts.refusal and not previous.refusal and contexts.authorities == previous.authorities:
            raise InvalidIdentity(f"identity: certificate {self._identity.certificate}: {contexts.refusal}")
        return contexts

    def _load(self) -> _Contexts:
        client, server = self._context(ssl.PROTOCOL_TLS_CLIENT), self._context(ssl.PROTOCOL_TLS_SERVER)
        return _Contexts(client, server, client.get_ca_certs(binary_form=True), self._refusal(client))

    def _refusal(self, client: ssl.SSLContext) -> str:
        """Why a client with this identity refuses a server with the same one, by a handshake in memory."""
        server = self._context(ssl.PROTOCOL_TLS_SERVER)
        server.verify_mode = ssl.CERT_NONE
        requests, responses = ssl.MemoryBIO(), ssl.MemoryBIO()
        caller, callee = client.wrap_bio(responses, requests), server.wrap_bio(requests, responses, server_side=True)
        for side in (caller, callee, caller):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return explain_ssl_error(error)
        return ""

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
            context.load_cert_chain(files.certificate, files.key, password=no_password)
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


def expiration_time(pem: str) -> float:
    """Unix time at which the first certificate of a chain expires. Raises ValueError if it is invalid."""
    certificates = _PEM_CERTIFICATE.findall(pem)
    try:
        return min(_not_after(ssl.PEM_cert_to_DER_cert(certificate)) for certificate in certificates)
    except (IndexError, ValueError) as error:
        raise ValueError(f"not a PEM certificate: {error}") from error


def _not_after(certificate: bytes) -> float:
    """Expiration time of an X.509 certificate: its `tbsCertificate.validity.notAfter` (RFC 5280, 4.1)."""
    signed = _der_elements(_der_elements(certificate)[0][1])[0][1]
    fields = [content for tag, content in _der_elements(signed) if tag != _VERSION]
    tag, not_after = _der_elements(fields[_VALIDITY])[1]
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(not_after.decode("ascii"), form).replace(tzinfo=UTC).timestamp()


def _der_elements(content: bytes) -> list[tuple[int, bytes]]:
    """Tags and contents of consecutive DER elements (X.690, 8.1)."""
    elements, position = [], 0
    while position < len(content):
        tag, length, position = content[position], content[position + 1], position + 2
        if length & _LONG_FORM:
            size = length ^ _LONG_FORM
            length, position = int.from_bytes(content[position : position + size], "big"), position + size
        elements.append((tag, content[position : position + length]))
        position += length
    return elements


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


def no_password() -> str:
    raise ValueError("the key is encrypted; give one without a password")
