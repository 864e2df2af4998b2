"""Weights from a real MinIO, over connections that are slow or break."""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import save_file

from tests.model_servers.minio import ACCESS_KEY, SECRET_KEY, ObjectStore, Proxy, minio
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.weights import cache
from trimtab_model_servers.weights.files import SUFFIX, FetchLimits
from trimtab_model_servers.weights.source import find_weights

IMPATIENT = FetchLimits(connect_seconds=1.0, read_seconds=0.5, stall_seconds=1.0, total_seconds=60.0)
"""For what is to be given up; whatever is to be fetched in the end is waited for as long as ever."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with minio(tmp_path_factory.mktemp("minio")) as store:
        yield store


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file({"weight": torch.rand(500_000, generator=torch.Generator().manual_seed(1))}, path)
    return path


@pytest.fixture(scope="module")
def digest(weights: Path) -> str:
    return f"sha256:{hashlib.sha256(weights.read_bytes()).hexdigest()}"


@pytest.fixture
def store(running: ObjectStore, monkeypatch, tmp_path: Path) -> ObjectStore:
    monkeypatch.setenv("AWS_ENDPOINT_URL", running.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("TRIMTAB_WEIGHTS_CACHE", str(tmp_path / "cache"))
    return running


@pytest.fixture
def address(store: ObjectStore, weights: Path) -> str:
    return store.put("models", "small/model.safetensors", weights)


@pytest.fixture
def proxy(store: ObjectStore, monkeypatch) -> Iterator[Proxy]:
    between = Proxy(store.port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", between.endpoint)
    yield between
    between.close()


def kept(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").glob("*") if not path.name.startswith(".")]


def test_object_is_fetched_with_and_without_digest(address: str, weights: Path, digest: str):
    for found in (find_weights(address, digest), find_weights(address, None)):
        assert isinstance(found, Path)
        assert found.read_bytes() == weights.read_bytes()


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://models/absent.safetensors", r"s3://models/absent.safetensors .*NoSuchKey.*correct the key"),
        ("s3://nothing-here/model.safetensors", r"s3://nothing-here/model.safetensors .*NoSuch(Bucket|Key).*correct"),
    ],
)
def test_missing_object_is_reported(address: str, tmp_path: Path, uri: str, message: str):
    with pytest.raises(ModelError, match=message):
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


def test_a_slow_store_is_waited_for(address: str, proxy: Proxy, weights: Path, digest: str):
    proxy.bytes_per_second = 2e6
    found = find_weights(address, digest)

    assert isinstance(found, Path)
    assert found.read_bytes() == weights.read_bytes()


def test_slow_store_fails_after_the_total_timeout(address: str, proxy: Proxy, digest: str, tmp_path: Path):
    proxy.bytes_per_second = 20_000
    with pytest.raises(
        ModelError, match=r"only [0-9]+ of 2000[0-9]+ bytes arrived in 1 s; is the object store overloaded"
    ):
        find_weights(address, digest, FetchLimits(total_seconds=1.0))
    assert kept(tmp_path) == []


def test_broken_download_is_resumed(address: str, proxy: Proxy, weights: Path, digest: str):
    proxy.cut_after_bytes = [1_000_000, 500_000, 0]
    found = find_weights(address, digest)

    assert isinstance(found, Path)
    assert found.read_bytes() == weights.read_bytes()
    assert proxy.connections == 4


def test_store_that_disappears_fails_the_download(address: str, proxy: Proxy, digest: str, tmp_path: Path):
    proxy.bytes_per_second = 1e6
    gone = threading.Timer(0.7, proxy.close)
    gone.start()
    with pytest.raises(ModelError, match=r"no data for [0-9]+ s; check AWS_ENDPOINT_URL"):
        find_weights(address, digest, IMPATIENT)
    gone.join()
    assert kept(tmp_path) == []


def test_concurrent_pods_fetch_once(address: str, proxy: Proxy, digest: str, tmp_path: Path):
    proxy.bytes_per_second = 2e6
    with ThreadPoolExecutor(3) as pods:  # the lock is one of open files, so that threads exclude each other as well
        found = set(pods.map(lambda _: find_weights(address, digest), range(3)))

    assert len(found) == 1
    assert len(kept(tmp_path)) == 1
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


def test_cache_is_bounded_but_keeps_recently_used_files(address: str, monkeypatch, tmp_path: Path, digest: str):
    old, fresh = tmp_path / "cache" / "old.safetensors", tmp_path / "cache" / "fresh.safetensors"
    for path in (old, fresh):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 1000)
    os.utime(old, (1, 1))
    monkeypatch.setenv("TRIMTAB_WEIGHTS_CACHE_BYTES", "1500")
    found = find_weights(address, digest)

    assert {path.name for path in kept(tmp_path)} == {"fresh.safetensors", Path(str(found)).name}


def test_unwritable_cache_is_reported(address: str, monkeypatch, tmp_path: Path, digest: str):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TRIMTAB_WEIGHTS_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"the weights cache .*file cannot be used: .*; set TRIMTAB_WEIGHTS_CACHE"):
        find_weights(address, digest)
