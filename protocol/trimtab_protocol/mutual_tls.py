"""TLS in which both sides show a certificate, with files that may be replaced at any time.

TLS 1.3 alone, since both sides are ours: it knows no renegotiation, and without tickets no session that outlives the
trust in who began it. Who is met is decided by the authorities in a file and, where one is given, by a name. Addresses
do not count: pods have new ones each time.
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
"""By what a file that was replaced is told from the one before: of each its inode, size and time."""
_NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"}


class InvalidIdentity(ValueError):
    """The files cannot be used; the message names them."""


@dataclass(frozen=True, slots=True)
class _Contexts:
    client: ssl.SSLContext
    server: ssl.SSLContext


class MutualTls:
    """Contexts for both sides of a connection, made anew when the files have changed.

    Args:
        identity: the files, and the name that others must bear.

    Raises:
        InvalidIdentity: the files cannot be used as they are now.
    """

    def __init__(self, identity: ReplicaIdentity) -> None:
        self._identity = identity
        self._stamp = _file_versions(identity)
        self._contexts = self._load()
        self._refusals: set[str] = set()

    def client_context(self) -> ssl.SSLContext:
        """The context for a connection to be made now; the same object as long as the files stay the same."""
        return self._current().client

    def server_context(self) -> ssl.SSLContext:
        """A context to listen with: whoever connects is met with the files as they are then."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.sni_callback = self._meet
        return context

    def _meet(self, peer: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        peer.context = self._current().server  # authorities included: a session is verified by its context's

    def _current(self) -> _Contexts:
        stamp = _file_versions(self._identity)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._contexts = self._load()
            except InvalidIdentity as error:  # files that are being written, perhaps
                log.warning("%s; the certificate before stays in use", error)
            else:
                self._refusals.clear()
                log.info("%s: a new certificate is in use", self._identity.certificate)
        return self._contexts

    def _load(self) -> _Contexts:
        return _Contexts(self._context(ssl.PROTOCOL_TLS_CLIENT), self._context(ssl.PROTOCOL_TLS_SERVER))

    def _context(self, side: int) -> ssl.SSLContext:
        files, context = self._identity, ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an authority may have one above it
        if side == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        context.sslobject_class = _peer_check(
            files.name, self._tell_refused if side == ssl.PROTOCOL_TLS_SERVER else _quiet
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

    def _tell_refused(self, error: ssl.SSLError) -> None:
        """Log why somebody was not let in; each reason once, since anybody may try."""
        reason = explain_ssl_error(error)
        if reason not in self._refusals:
            self._refusals.add(reason)
            log.warning("who connected was refused: %s", reason)


def explain_ssl_error(error: OSError) -> str:
    """Why a connection under TLS did not come about, in words about the other side."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {getattr(error, 'verify_message', '') or error}"
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        return "it speaks no TLS"
    return str(error.strerror or error)


def certificate_names(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """The DNS names and URIs that a certificate bears."""
    names = (certificate or {}).get("subjectAltName", ())
    return tuple(name for kind, name in names if kind in {"DNS", "URI"})


def _peer_check(wanted: str, tell: Callable[[ssl.SSLError], None]) -> type[ssl.SSLObject]:
    """What leads a handshake: it checks the name too, and tells why who is not let in is not."""

    class Meeting(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
                self._check_name()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                tell(error)
                raise

        def _check_name(self) -> None:
            names = certificate_names(self.getpeercert())
            if wanted and wanted not in names:
                raise ssl.SSLCertVerificationError(
                    f"it is for {printable(', '.join(names), 200) or 'no name'}, not for {wanted}"
                )

    return Meeting


def _quiet(_: ssl.SSLError) -> None:
    """Tell nothing: who connects is told by what is raised."""


def _file_versions(identity: ReplicaIdentity) -> FileVersions | None:
    try:
        found = [Path(file).stat() for file in (identity.certificate, identity.key, identity.ca)]
    except OSError:
        return None
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns) for each in found)


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a password")
