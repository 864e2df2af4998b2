"""A door that lets in only who trusts its certificate and shows a key: what it is given, made anew for one run."""

from pathlib import Path

from benchmarks.clients.tools import output_of, system_program
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.edge_settings import EdgeSettings, EdgeTls
from trimtab_router.envoy.api_keys import HashedKey, format_entry, key_digest

CALLER = "clients"
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


def authority(folder: Path) -> Path:
    """Where the authority's certificate is, which callers trust."""
    return folder / "authority.crt"


def secure(folder: Path, key: str) -> Path:
    """Make certificates and the list of keys in a folder; return the file of the door's settings."""
    folder.mkdir()
    certificate, certificate_key, keys = folder / "tls.crt", folder / "tls.key", folder / "keys"
    own_key = folder / "authority.key"
    _certify("/CN=authority", own_key, authority(folder))
    names = "subjectAltName=IP:127.0.0.1,DNS:localhost"
    signed = ("-CA", str(authority(folder)), "-CAkey", str(own_key), "-addext", names)
    _certify("/CN=localhost", certificate_key, certificate, *signed)
    keys.write_text(f"{CALLER}: {format_entry(HashedKey(CALLER, key_digest(key)))}\n")
    file = folder / "edge.yaml"
    write_json(
        file, EdgeSettings(tls=EdgeTls(certificate=str(certificate), key=str(certificate_key)), keys_file=str(keys))
    )
    return file


def _certify(subject: str, key: Path, certificate: Path, *more: str) -> None:
    made = ("-keyout", str(key), "-out", str(certificate), "-subj", subject)
    output_of([system_program("openssl"), "req", "-x509", *_CURVE, *made, *more])
