"""Mutual TLS: certificates of both sides, authorization, and replaced files."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.router.envoy.openssl import Authority, Holder, openssl
from trimtab_pipelines.edge_settings import ReplicaIdentity
from trimtab_protocol.mutual_tls import InvalidIdentity, MutualTls, expiration_time, explain_ssl_error


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca").begin()


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "other", "other").begin()


@pytest.mark.parametrize("days", ["1", "400", "20000"])
def test_expiration_time_is_the_earliest_of_a_chain(tmp_path: Path, authority: Authority, days: str) -> None:
    file = tmp_path / "tls.crt"
    key = ("-newkey", "rsa:2048", "-nodes", "-keyout", str(tmp_path / "tls.key"))
    openssl("req", "-x509", *key, "-out", str(file), "-days", days, "-subj", "/CN=one")
    shown = openssl("x509", "-in", str(file), "-noout", "-enddate").decode().strip().removeprefix("notAfter=")
    own, of_authority = ssl.cert_time_to_seconds(shown), expiration_time(authority.file.read_text())
    assert expiration_time(file.read_text()) == own
    assert expiration_time(f"{file.read_text()}\n{authority.file.read_text()}") == min(own, of_authority)


@pytest.mark.parametrize("content", ["", "MIIB", "{0}\n{1}", "{0}\nMIIB\n{1}", "{0}\nMAMCAQE=\n{1}"])
def test_file_without_certificate_has_no_expiration_time(content: str) -> None:
    with pytest.raises(ValueError, match="not a PEM certificate"):
        expiration_time(content.format("-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"))


@asynccontextmanager
async def listening(identity: ReplicaIdentity) -> AsyncIterator[int]:
    """Echo a line to who is let in; yields the port."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=MutualTls(identity).server_context())
    async with server:
        yield server.sockets[0].getsockname()[1]


async def met(port: int, context: ssl.SSLContext) -> str:
    """The serial number of who is met there; an OSError where either side refuses."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(b"hello\n")
    try:
        if await reader.readline() != b"hello\n":
            raise ConnectionResetError("it closed the connection")
        return str(writer.get_extra_info("peercert")["serialNumber"])
    finally:
        writer.close()


@pytest.mark.parametrize("mounted", [False, True], ids=["moved files", "a mounted Secret"])
async def test_replaced_certificate_applies_to_new_connections(tmp_path, authority, other, mounted):
    replica = Holder(tmp_path / "replica", mounted).take(authority, authority)
    router = Holder(tmp_path / "router", mounted).take(authority, authority)
    tls = MutualTls(router.identity())
    async with listening(replica.identity()) as port:
        before = tls.client_context()
        first = await met(port, before)
        assert tls.client_context() is before

        replica.take(authority, authority)
        assert await met(port, before) != first
        replica.take(other, other)
        with pytest.raises(ssl.SSLCertVerificationError):
            await met(port, tls.client_context())
        router.take(authority, other)
        assert tls.client_context() is not before
        with pytest.raises(OSError, match="closed"):  # of the authority that was trusted before
            await met(port, tls.client_context())
        router.take(other, other)
        await met(port, tls.client_context())


@pytest.mark.parametrize("expired", [True, False])
async def test_refused_certificate_keeps_the_previous(tmp_path, authority, other, caplog, expired):
    router = Holder(tmp_path / "router").take(authority, authority)
    tls = MutualTls(router.identity())
    before = tls.client_context()

    router.take(authority if expired else other, authority, expired=expired)
    assert tls.client_context() is before
    assert "its certificate is refused: " in caplog.text
    router.take(authority, authority)
    assert tls.client_context() is not before


async def test_invalid_files_keep_the_previous_certificate(tmp_path, authority, caplog):
    router = Holder(tmp_path / "router").take(authority, authority)
    tls = MutualTls(router.identity())
    before = tls.client_context()
    (router.folder / "tls.key").unlink()
    for _ in range(3):
        assert tls.client_context() is before
    (router.folder / "tls.key").write_text("no key")
    assert tls.client_context() is before
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 2
    assert all(str(router.folder / "tls.key") in line and "keeping the previous certificate" in line for line in warned)
    router.take(authority, authority)
    assert tls.client_context() is not before


@pytest.mark.parametrize("kind", ["other authority", "expired", "no certificate", "TLS 1.2", "plain"])
async def test_untrusted_client_is_refused_and_logged_once(tmp_path, authority, other, caplog, kind):
    replica = Holder(tmp_path / "replica").take(authority, authority)
    signer = other if kind == "other authority" else authority
    unauthorized = Holder(tmp_path / "unauthorized").take(signer, authority, expired=kind == "expired")
    context = MutualTls(unauthorized.identity()).client_context()
    if kind in {"no certificate", "TLS 1.2"}:
        context = ssl.create_default_context(cafile=str(authority.file))
        context.check_hostname = False
    if kind == "TLS 1.2":
        context.load_cert_chain(unauthorized.folder / "tls.crt", unauthorized.folder / "tls.key")
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    async with listening(replica.identity()) as port:
        for _ in range(2):
            if kind == "plain":
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                assert await reader.read() == b""
                writer.close()
            else:
                with pytest.raises(OSError):  # noqa: PT011 - the other side tells nothing
                    await met(port, context)
    messages = [record.message for record in caplog.records if "refused" in record.message]
    assert len(messages) == 1
    expected = {
        "other authority": "its certificate is refused",
        "expired": "its certificate is refused: certificate has expired",
        "no certificate": "PEER_DID_NOT_RETURN_A_CERTIFICATE",
        "TLS 1.2": "UNSUPPORTED_PROTOCOL",
        "plain": "it does not use TLS",
    }
    assert expected[kind] in messages[0]


@pytest.mark.parametrize(("expired", "reason"), [(True, "has expired"), (False, "unable to get local issuer")])
async def test_untrusted_server_is_reported_with_the_reason(tmp_path, authority, other, expired, reason):
    replica = Holder(tmp_path / "replica").take(authority if expired else other, authority, expired=expired)
    router = Holder(tmp_path / "router").take(authority, authority)
    async with listening(replica.identity()) as port:
        with pytest.raises(ssl.SSLError) as refused:
            await met(port, MutualTls(router.identity()).client_context())
    assert explain_ssl_error(refused.value).startswith("its certificate is refused: ")
    assert reason in explain_ssl_error(refused.value)


@pytest.mark.parametrize("name", ["replicas.team-a", "spiffe://cluster.local/ns/team-a"])
async def test_required_name_is_checked_on_both_sides(tmp_path, authority, caplog, name):
    kind = "URI" if ":" in name else "DNS"
    right = Holder(tmp_path / "right").take(authority, authority, f"DNS:also,{kind}:{name}")
    wrong = Holder(tmp_path / "wrong").take(authority, authority, f"DNS:elsewhere,{kind}:{name}.not")
    async with listening(right.identity(name)) as port:
        await met(port, MutualTls(right.identity(name)).client_context())
        with pytest.raises(OSError, match="closed"):
            await met(port, MutualTls(wrong.identity()).client_context())
        assert f"it is for elsewhere, {name}.not, not for {name}" in caplog.text
    async with listening(wrong.identity()) as port:
        with pytest.raises(ssl.SSLCertVerificationError, match=f"not for {name}"):
            await met(port, MutualTls(right.identity(name)).client_context())


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("tls.crt", None, "tls.crt"),
        ("tls.key", "no key", "tls.key"),
        ("ca.crt", "no certificate", "ca.crt"),
        ("tls.key", "another", "tls.key"),
        ("tls.key", "encrypted", "give one without a password"),
    ],
)
def test_invalid_identity_names_its_files(tmp_path, authority, file, content, named):
    router = Holder(tmp_path / "router").take(authority, authority)
    if content is None:
        (router.folder / file).unlink()
    elif content == "another":
        (router.folder / file).write_bytes(authority.key.read_bytes())
    elif content == "encrypted":
        encrypt(router.folder / file)
    else:
        (router.folder / file).write_text(content)
    with pytest.raises(InvalidIdentity, match=named):
        MutualTls(router.identity())


def encrypt(key: Path) -> None:
    key.write_bytes(openssl("pkey", "-in", str(key), "-aes256", "-passout", "pass:secret"))
