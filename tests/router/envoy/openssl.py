"""Certificates, TLS identities and signed tokens, made by the openssl program."""

import base64
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trimtab_pipelines.edge_settings import ReplicaIdentity


def openssl(*arguments: str, data: bytes = b"") -> bytes:
    ran = subprocess.run(["openssl", *arguments], input=data, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout


_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Authority:
    """Signs certificates; `file` is its own."""

    folder: Path
    name: str = "authority"

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.crt"

    @property
    def key(self) -> Path:
        return self.folder / f"{self.name}.key"

    def begin(self) -> "Authority":
        self.folder.mkdir(parents=True, exist_ok=True)
        made = ("-keyout", str(self.key), "-out", str(self.file), "-days", "2", "-subj", f"/CN={self.name}")
        openssl("req", "-x509", *_EC, *made)
        return self

    def issue(self, common_name: str, certificate: Path, key: Path, names: str = "IP:127.0.0.1,DNS:localhost") -> None:
        made = ("-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", f"/CN={common_name}")
        openssl(
            "req",
            "-x509",
            *_EC,
            *made,
            "-CA",
            str(self.file),
            "-CAkey",
            str(self.key),
            "-addext",
            f"subjectAltName={names}",
        )

    def let_expire(self, certificate: Path, key: Path) -> None:
        copied = ("-copy_extensions", "copyall")
        wanted = openssl("x509", "-x509toreq", "-in", str(certificate), "-signkey", str(key), *copied)
        signer = ("-CA", str(self.file), "-CAkey", str(self.key), "-days", "0")
        certificate.write_bytes(openssl("x509", "-req", *signer, *copied, data=wanted))


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _written(content: Mapping[str, Any]) -> str:
    return _encoded(json.dumps(content).encode())


@dataclass(frozen=True)
class Signer:
    """Signs tokens with one key, RS256 or ES256."""

    pem: bytes
    name: str
    algorithm: str

    @classmethod
    @cache
    def make(cls, name: str, algorithm: str = "RS256") -> "Signer":
        kind = ("RSA", "rsa_keygen_bits:2048") if algorithm == "RS256" else ("EC", "ec_paramgen_curve:P-256")
        return cls(openssl("genpkey", "-algorithm", kind[0], "-pkeyopt", kind[1]), name, algorithm)

    @property
    def jwk(self) -> dict[str, str]:
        known = {"kid": self.name, "alg": self.algorithm, "use": "sig"}
        if self.algorithm == "RS256":
            modulus = openssl("rsa", "-noout", "-modulus", data=self.pem).decode().strip().partition("=")[2]
            return {**known, "kty": "RSA", "n": _encoded(bytes.fromhex(modulus)), "e": "AQAB"}
        point = openssl("pkey", "-pubout", "-outform", "DER", data=self.pem)[-64:]
        return {**known, "kty": "EC", "crv": "P-256", "x": _encoded(point[:32]), "y": _encoded(point[32:])}

    def token(self, folder: Path, claims: Mapping[str, Any], **head: Any) -> str:
        signed = ".".join(map(_written, ({"alg": self.algorithm, "kid": self.name, "typ": "JWT"} | head, claims)))
        key = folder / f"{self.name}.pem"
        key.write_bytes(self.pem)
        signature = openssl("dgst", "-sha256", "-sign", str(key), data=signed.encode())
        return f"{signed}.{_encoded(_raw(signature) if self.algorithm == 'ES256' else signature)}"


def _raw(signature: bytes) -> bytes:
    """An ECDSA signature as tokens have it: r and s with 32 bytes each, out of DER's two integers."""
    end = 4 + signature[3]
    r, s = signature[4:end], signature[end + 2 :]
    return b"".join(number.lstrip(b"\0").rjust(32, b"\0") for number in (r, s))


def unsigned(claims: Mapping[str, Any]) -> str:
    return f"{_written({'alg': 'none', 'typ': 'JWT'})}.{_written(claims)}."


def jwks(*signers: Signer) -> str:
    return json.dumps({"keys": [signer.jwk for signer in signers]})


def replace(file: Path, content: str | bytes) -> None:
    new = file.with_name(f".{file.name}.new")
    new.write_bytes(content if isinstance(content, bytes) else content.encode())
    new.replace(file)


def mount(folder: Path, files: Mapping[str, bytes], generation: int) -> None:
    """Put files into a folder as a node mounts a Secret: links through `..data`, which is swapped in one step."""
    behind = folder / f"..generation-{generation}"
    behind.mkdir(parents=True)
    for name, content in files.items():
        (behind / name).write_bytes(content)
        if not (link := folder / name).is_symlink():
            link.symlink_to(Path("..data") / name)
    fresh = folder / "..data_tmp"
    fresh.symlink_to(behind.name)
    fresh.replace(folder / "..data")


def contents(folder: Path, names: Sequence[str]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


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
