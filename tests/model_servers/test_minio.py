"""Weights from a real MinIO, over connections that are slow or break."""

import hashlib
import json
import logging
import os
import shutil
import socket
import socketserver
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from minio import Minio
from safetensors.torch import save_file

from tests.builders import a_pipeline, a_stage, a_variant
from tests.control_plane import tool
from tests.fakes.hub import COMMIT, Hub
from tests.model_servers.test_hf_folder import contents
from tests.model_servers.test_remote_weights import content
from tests.processes import held_port, running
from trimtab.app import run
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.weights import cache
from trimtab_model_servers.weights.files import SUFFIX, FetchLimits
from trimtab_model_servers.weights.source import find_folder, find_weights
from trimtab_pipelines.documents import dump_yaml, load_pipeline

ACCESS_KEY, SECRET_KEY = "reader", "a-confidential-key"
START_SECONDS = 30.0


@contextmanager
def minio(folder: Path) -> Iterator[int]:
    """Run MinIO over an empty folder; yield its port."""
    environment = {"MINIO_ROOT_USER": ACCESS_KEY, "MINIO_ROOT_PASSWORD": SECRET_KEY, "MINIO_BROWSER": "off"}
    with held_port() as port, held_port() as console:
        addresses = ("--address", f"127.0.0.1:{port}", "--console-address", f"127.0.0.1:{console}")
        command = [tool("minio"), "server", "--quiet", *addresses, str(folder / "data")]
        with running(command, folder / "log", environment=os.environ | environment | {"HOME": str(folder)}) as process:
            _wait(port, process, folder / "log")
            yield port


def _wait(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        with suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/minio/health/ready").close()
            return
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"MinIO did not come up: {log.read_text()[-2000:]}")
        time.sleep(0.05)


class Proxy(socketserver.ThreadingTCPServer):
    """Relays connections to a port; responses may be slowed, or cut after some bytes of a connection."""

    daemon_threads = True

    def __init__(self, to: int) -> None:
        super().__init__(("127.0.0.1", 0), _Relay)
        self.to, self.connections, self.bytes_per_second = to, 0, float("inf")
        self.cut_after_bytes: list[int] = []
        """Of each connection from the first one on; later ones are not cut."""


class _Relay(socketserver.BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        proxy, sent = self.server, 0
        cut = proxy.cut_after_bytes[proxy.connections] if proxy.connections < len(proxy.cut_after_bytes) else 2**62
        proxy.connections += 1
        with socket.create_connection(("127.0.0.1", proxy.to)) as upstream, suppress(OSError):
            threading.Thread(target=_send_all, args=(self.request, upstream), daemon=True).start()
            while sent < cut and (data := upstream.recv(int(min(65536, proxy.bytes_per_second * 0.02 + 1)))):
                self.request.sendall(data[: cut - sent])
                sent += len(data)
                time.sleep(len(data) / proxy.bytes_per_second)


def _send_all(source: socket.socket, to: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            to.sendall(data)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with minio(tmp_path_factory.mktemp("minio")) as port:
        yield port


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file({"weight": torch.rand(500_000, generator=torch.Generator().manual_seed(1))}, path)
    return path


@pytest.fixture(scope="module")
def digest(weights: Path) -> str:
    return f"sha256:{hashlib.sha256(weights.read_bytes()).hexdigest()}"


@pytest.fixture
def address(port: int, weights: Path, weights_cache: Path, monkeypatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    client = Minio(f"127.0.0.1:{port}", access_key=ACCESS_KEY, secret_key=SECRET_KEY, secure=False)
    if not client.bucket_exists("models"):
        client.make_bucket("models")
        client.fput_object("models", "small/model.safetensors", str(weights))
    return "s3://models/small/model.safetensors"


@pytest.fixture
def proxy(port: int, address: str, monkeypatch) -> Iterator[Proxy]:
    with Proxy(port) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{between.server_address[1]}")
        threading.Thread(target=between.serve_forever, args=(0.05,), daemon=True).start()
        yield between
        between.shutdown()


def kept(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").glob("*") if not path.name.startswith(".")]


def test_object_is_fetched_with_and_without_digest(address: str, weights: Path, digest: str):
    for required in (digest, None):
        assert content(find_weights(address, required)) == weights.read_bytes()


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("s3://models/absent.safetensors", "NoSuchKey.*correct the key"),
        ("s3://nothing-here/model.safetensors", "NoSuch(Bucket|Key).*correct"),
    ],
)
def test_missing_object_is_reported(address: str, tmp_path: Path, uri: str, why: str):
    with pytest.raises(ModelError, match=f"{uri} .*{why}"):
        find_weights(uri, None)
    assert kept(tmp_path) == []


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_fail_at_once_and_are_not_logged(
    address: str, monkeypatch, caplog: pytest.LogCaptureFixture, variable: str
):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(variable, "wrong-and-secret")
    with pytest.raises(ModelError, match=r"check AWS_") as refused:
        find_weights(address, None)

    for reported in (str(refused.value), caplog.text):
        assert SECRET_KEY not in reported
        assert "wrong-and-secret" not in reported or variable == "AWS_ACCESS_KEY_ID"


def test_another_digest_is_refused(address: str, tmp_path: Path, digest: str):
    with pytest.raises(ModelError, match=f"have digest {digest}, but sha256:0+ is required"):
        find_weights(address, f"sha256:{'0' * 64}")
    assert kept(tmp_path) == []


def test_slow_store_fails_after_the_total_timeout(address: str, proxy: Proxy, digest: str, tmp_path: Path):
    proxy.bytes_per_second = 20_000
    overloaded = "only [0-9]+ of 2000[0-9]+ bytes arrived in 1 s; is the object store overloaded"
    with pytest.raises(ModelError, match=overloaded):
        find_weights(address, digest, FetchLimits(total_seconds=1.0))
    assert kept(tmp_path) == []


def test_broken_download_is_resumed(address: str, proxy: Proxy, weights: Path, digest: str):
    proxy.cut_after_bytes = [1_000_000, 500_000, 0]

    assert content(find_weights(address, digest)) == weights.read_bytes()
    assert proxy.connections == 4


def test_concurrent_pods_fetch_once_from_a_slow_store(
    address: str, proxy: Proxy, weights: Path, digest: str, tmp_path: Path
):
    proxy.bytes_per_second = 2e6
    with ThreadPoolExecutor(3) as pods:  # the lock is one of open files, so that threads exclude each other as well
        found = set(pods.map(lambda _: find_weights(address, digest), range(3)))

    assert len(found) == 1
    assert [path.read_bytes() for path in kept(tmp_path)] == [weights.read_bytes()]
    assert proxy.connections == 1


def test_wait_for_another_pod_does_not_count_as_stall(address: str, proxy: Proxy, digest: str):
    """A pod fetches and fails; the next one, which waited longer than its patience, meets a connection that breaks."""
    stall_seconds, fetching = 2.0, threading.Event()

    def fetch_in_vain(_: BinaryIO) -> None:
        fetching.set()
        time.sleep(stall_seconds + 0.5)
        raise ModelError("in vain")

    def other_pod() -> None:
        with pytest.raises(ModelError, match="in vain"):
            cache.cached_file(f"{digest.replace(':', '-')}{SUFFIX}", lambda _: True, fetch_in_vain, 60.0)

    proxy.cut_after_bytes = [0]
    with ThreadPoolExecutor(1) as pods:
        other = pods.submit(other_pod)
        fetching.wait()
        found = find_weights(address, digest, FetchLimits(stall_seconds=stall_seconds))
        other.result()

    assert isinstance(found, Path)
    assert proxy.connections == 2


def test_pushed_weights_are_those_that_their_document_names(
    address: str, weights: Path, digest: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (folder := tmp_path / "mine").mkdir()
    shutil.copy(weights, folder / "small.safetensors")
    (checkpoint := folder / "large").mkdir()
    for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
        (checkpoint / name).write_bytes(b"{}")
    uris = ("small.safetensors", "large", "random://?seed=1")
    variants = [a_variant(f"v{number}", storageUri=uri) for number, uri in enumerate(uris)]
    (folder / "pipeline.yaml").write_text(before := f"# mine\n{dump_yaml(a_pipeline([a_stage(variants=variants)]))}")

    outcomes = [run(["push", str(folder), "s3://models/mine", "-o", str(tmp_path / "pushed.yaml")]) for _ in range(2)]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('{"name":"push"')]

    assert outcomes == [0, 0]
    assert [json.loads(line)["figures"] for line in lines] == [{"files": 3, "sent": 3}, {"files": 3, "sent": 0}]
    assert (folder / "pipeline.yaml").read_text() == before
    assert (tmp_path / "pushed.yaml").read_text().startswith("# mine\n")
    small, large, seeded = load_pipeline(tmp_path / "pushed.yaml").spec.stages[0].variants
    assert (small.storage_uri, small.digest) == ("s3://models/mine/small.safetensors", digest)
    assert content(find_weights(small.storage_uri, small.digest)) == weights.read_bytes()
    assert (large.storage_uri, large.digest) == ("s3://models/mine/large", None)
    stored = find_folder(large.storage_uri, None)
    assert stored is not None
    assert sorted(path.name for path in stored.iterdir()) == ["config.json", "model.safetensors"]
    assert seeded.storage_uri == "random://?seed=1"

    (folder / "small.safetensors").write_bytes(b"other")
    assert run(["push", str(folder), "s3://models/mine"]) == 2
    assert "s3://models/mine/small.safetensors has other content" in capsys.readouterr().err
    assert run(["push", str(folder), "s3://nothing-here/mine"]) == 2
    assert "NoSuchBucket" in capsys.readouterr().err
    assert content(find_weights(small.storage_uri, small.digest)) == weights.read_bytes()


@pytest.mark.parametrize("target", ["s3://models/hub", "copies"])
def test_mirror_names_copies_of_the_hub_by_commit(
    address: str, running_hub: Hub, target: str, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    uris = (running_hub.put("owner/name", "a/model.safetensors", b"one"), "hf://owner/folder", address)
    for name in ("config.json", "model.safetensors"):
        running_hub.put("owner/folder", name, b"{}")
    variants = [a_variant(f"v{number}", storageUri=uri) for number, uri in enumerate(uris)]
    (tmp_path / "pipeline.yaml").write_text(dump_yaml(a_pipeline([a_stage(variants=variants)])))

    assert [run(["mirror", ".", "--to", target, "-o", str(tmp_path / "mirrored.yaml")]) for _ in range(2)] == [0, 0]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith('{"name":"mirror"')]
    assert [json.loads(line)["figures"] for line in lines] == [{"files": 3, "sent": 3}, {"files": 3, "sent": 0}]

    file, folder, stored = load_pipeline(tmp_path / "mirrored.yaml").spec.stages[0].variants
    place = target if target.startswith("s3:") else str(tmp_path / target)
    assert file.storage_uri == f"{place}/owner/name/{COMMIT}/a/model.safetensors"
    assert content(find_weights(file.storage_uri, file.digest)) == b"one"
    assert folder.storage_uri == f"{place}/owner/folder/{COMMIT}"
    assert contents(find_folder(folder.storage_uri, folder.digest)) == {
        "config.json": b"{}",
        "model.safetensors": b"{}",
    }
    assert stored.storage_uri == address


def test_unwritable_cache_is_reported(address: str, monkeypatch, tmp_path: Path, digest: str):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TRIMTAB_WEIGHTS_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"the weights cache .*file cannot be used: .*; set TRIMTAB_WEIGHTS_CACHE"):
        find_weights(address, digest)
