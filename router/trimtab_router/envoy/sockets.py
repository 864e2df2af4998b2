"""Where a door and its router find each other: Unix sockets in one folder that nobody else can enter."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Sockets:
    """The sockets between Envoy and the router, and a note that outlives either."""

    folder: Path

    @property
    def requests(self) -> Path:
        """The router's, for callers' requests."""
        return self.folder / "requests.sock"

    @property
    def services(self) -> Path:
        """The router's, for gRPC's own health and reflection services."""
        return self.folder / "services.sock"

    @property
    def control(self) -> Path:
        """The router's, for what Envoy itself asks: routes and token issuers' keys."""
        return self.folder / "control.sock"

    @property
    def envoy(self) -> Path:
        """Envoy's administration."""
        return self.folder / "envoy.sock"

    @property
    def counted(self) -> Path:
        """The router's note of what it counted of Envoy's refusals, for the router after it."""
        return self.folder / "counted.json"

    @property
    def pressure(self) -> Path:
        """The router's word to Envoy: which share of all requests it refuses unread."""
        return self.folder / "pressure"


@dataclass(frozen=True, slots=True)
class SocketFolder:
    """Where a door listens for callers, what a request may weigh, and whether callers chat."""

    sockets: Sockets
    host: str = "127.0.0.1"
    rest_port: int = 0
    grpc_port: int = 0
    max_payload_bytes: int = 64 * 2**20
    folder: Path | None = None
    chats: bool = False

    @property
    def told_in(self) -> Path:
        """The folder of the files that tell Envoy where its certificates are: beside the sockets unless it is given."""
        return self.folder or self.sockets.folder
