"""What the doors of a run ask for: a certificate of an authority made for the run, and keys, in two Secrets."""

import asyncio
import base64
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tests.router.envoy.openssl import Authority, openssl
from trimtab_kubernetes.objects import Object
from trimtab_loadtester.clients import Access
from trimtab_router.envoy.api_keys import HashedKey, format_entry, key_digest, new_key

TLS_SECRET, KEYS_SECRET = "trimtab-tls", "trimtab-keys"
LOAD = "load"
"""The client that sends loads."""


@dataclass(slots=True)
class Credentials:
    """An authority, and the keys in force by client."""

    authority: Authority
    keys: dict[str, str] = field(default_factory=dict)

    @classmethod
    async def make(cls) -> "Credentials":
        """Make the authority, and a key for who sends loads."""
        folder = Path(tempfile.mkdtemp(prefix="trimtab-credentials-"))
        made = cls(await asyncio.to_thread(Authority(folder).begin))
        made.keys[LOAD] = new_key()
        return made

    @property
    def tls(self) -> ssl.SSLContext:
        """For connections to doors, whose certificates it checks."""
        return ssl.create_default_context(cafile=str(self.authority.file))

    def access(self, client: str = LOAD) -> Access:
        """What a client needs to call: its key, in a file that nobody else can read, and the authority."""
        file = self.authority.folder / f"{client}.key"
        file.touch(mode=0o600)
        file.write_text(self.keys[client])
        return Access(self.authority.file, file)

    async def certificate(self, namespace: str, host: str) -> tuple[Object, str]:
        """Make a certificate for an address; return the Secret and the certificate's serial number."""
        files = {name: self.authority.folder / name for name in ("tls.crt", "tls.key")}
        pair = (files["tls.crt"], files["tls.key"])
        await asyncio.to_thread(self.authority.issue, "router", *pair, f"IP:{host}")
        told = await asyncio.to_thread(openssl, "x509", "-noout", "-serial", "-in", str(files["tls.crt"]))
        content = {name: file.read_bytes() for name, file in files.items()}
        return _secret(TLS_SECRET, namespace, "kubernetes.io/tls", content), told.decode().strip().partition("=")[2]

    def hashed(self, namespace: str) -> Object:
        """The Secret of the keys in force, of which it knows only the hashes."""
        entries = {
            client: format_entry(HashedKey(client, key_digest(key))).encode() for client, key in self.keys.items()
        }
        return _secret(KEYS_SECRET, namespace, "Opaque", entries)


def _secret(name: str, namespace: str, kind: str, content: dict[str, bytes]) -> Object:
    data = {key: base64.b64encode(value).decode() for key, value in content.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": kind,
        "metadata": {"name": name, "namespace": namespace},
        "data": data,
    }
