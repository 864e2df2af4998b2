"""TLS identities of routers and replicas, in files that are replaced by kubelet or by hand."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from tests.router.envoy.openssl import Authority, contents, mount
from trimtab_pipelines.edge_settings import ReplicaIdentity

FILES = ("ca.crt", "tls.crt", "tls.key")


@dataclass
class Holder:
    """Who shows certificates, in a folder of its own."""

    folder: Path
    mounted: bool = False
    generation: int = 0

    def take(
        self, signer: Authority, trusts: Authority, names: str = "DNS:shared", *, expired: bool = False
    ) -> "Holder":
        made = self.folder.with_name(f"{self.folder.name}-made")
        made.mkdir(parents=True, exist_ok=True)
        signer.issue("one", made / "tls.crt", made / "tls.key", names)
        if expired:
            signer.let_expire(made / "tls.crt", made / "tls.key")
        shutil.copy(trusts.file, made / "ca.crt")
        if self.mounted:
            mount(self.folder, contents(made, FILES), self.generation)
            self.generation += 1
            return self
        self.folder.mkdir(exist_ok=True)
        for name in FILES:
            shutil.copy(made / name, self.folder / f".{name}")
            (self.folder / f".{name}").replace(self.folder / name)
        return self

    def identity(self, name: str = "") -> ReplicaIdentity:
        ca, certificate, key = (str(self.folder / file) for file in FILES)
        return ReplicaIdentity(certificate=certificate, key=key, ca=ca, name=name)
