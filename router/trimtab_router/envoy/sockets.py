"""Unix sockets between Envoy and its router, in a private folder."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Sockets:
    """Sockets between Envoy and the router, and files that outlive either process."""

    folder: Path

    @property
    def requests(self) -> Path:
        return self.folder / "requests.sock"

    @property
    def services(self) -> Path:
        """The router's socket for gRPC health and reflection."""
        return self.folder / "services.sock"

    @property
    def control(self) -> Path:
        """The router's socket for Envoy's routes and the JWT issuers' keys."""
        return self.folder / "control.sock"

    @property
    def envoy_admin(self) -> Path:
        return self.folder / "envoy.sock"

    @property
    def counters_file(self) -> Path:
        """Envoy counters that this router has read, for the next router."""
        return self.folder / "counted.json"

    @property
    def endpoints_file(self) -> Path:
        """Replicas that the cluster reported last, for the next router."""
        return self.folder / "endpoints.json"

    @property
    def pressure(self) -> Path:
        """Share of all requests that Envoy rejects unread, written by the router."""
        return self.folder / "pressure"


@dataclass(frozen=True, slots=True)
class SocketFolder:
    """Addresses of an Envoy, and the limits of its requests."""

    sockets: Sockets
    host: str = "127.0.0.1"
    rest_port: int = 0
    grpc_port: int = 0
    max_payload_bytes: int = 64 * 2**20
    folder: Path | None = None
    """Folder of the certificate files, None for that of the sockets."""
    chats: bool = False
    """Whether the pipeline serves chats."""

    @property
    def certificates_folder(self) -> Path:
        return self.folder or self.sockets.folder
