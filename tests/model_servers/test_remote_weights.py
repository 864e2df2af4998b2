"""Weights from an object store or the Hub: fetched once, bounded, and shared by no tenants."""

import hashlib
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.fakes.hub import Hub
from tests.fakes.object_store import ObjectStore
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.weights.files import FetchLimits
from trimtab_model_servers.weights.source import RandomSeed, find_weights

IMPATIENT = FetchLimits(connect_seconds=1.0, read_seconds=0.2, stall_seconds=0.5, total_seconds=60.0)
CONTENT = save({"weight": torch.arange(1000, dtype=torch.float32)})
OTHER = "f" * 40
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


def gets(place: ObjectStore) -> list[str]:
    """Requests for files, without those of the Hub's client for its metadata."""
    files = "/resolve/" if isinstance(place, Hub) else "/"
    return [request for request in place.requests if request.startswith("GET ") and files in request]


def content(found: Path | RandomSeed) -> bytes:
    assert isinstance(found, Path)
    return found.read_bytes()


def cached(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_object_is_fetched_again_only_if_it_changed(store: ObjectStore):
    for content in (CONTENT, save({"weight": torch.zeros(3)})):
        address = store.put("models", "small/model.safetensors", content)
        found = {find_weights(address, None) for _ in range(2)}
        assert [path.read_bytes() for path in found if isinstance(path, Path)] == [content]

    assert gets(store) == ["GET /models/small/model.safetensors"] * 2


def test_cached_digest_needs_no_object_store(store: ObjectStore):
    address = store.put("models", "model.safetensors", CONTENT)
    first = find_weights(address, DIGEST)
    asked = len(store.requests)
    assert find_weights(address, DIGEST) == first
    assert len(store.requests) == asked


def test_damaged_cached_file_is_fetched_again(store: ObjectStore):
    address = store.put("models", "model.safetensors", CONTENT)
    kept = find_weights(address, DIGEST)
    assert isinstance(kept, Path)
    kept.write_bytes(b"damaged")
    assert content(find_weights(address, DIGEST)) == CONTENT


def test_stalled_store_fails_the_download(store: ObjectStore, tmp_path):
    address = store.put("models", "model.safetensors", CONTENT)
    store.stall_after_bytes = 100
    with pytest.raises(ModelError, match=r"model.safetensors at http.*check AWS_ENDPOINT_URL"):
        find_weights(address, None, IMPATIENT)
    assert cached(tmp_path) == []


def test_weights_above_the_bound_are_not_fetched(store: ObjectStore):
    address = store.put("models", "model.safetensors", CONTENT)
    with pytest.raises(ModelError, match=f"{len(CONTENT)} bytes exceed the 1000 allowed"):
        find_weights(address, None, FetchLimits(max_bytes=1000))
    assert not gets(store)


@pytest.mark.parametrize("endpoint", ["minio:9000", "ftp://minio"])
def test_an_endpoint_that_is_none(store: ObjectStore, monkeypatch, endpoint):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ModelError, match=r"AWS_ENDPOINT_URL is .*set for instance http://minio:9000"):
        find_weights("s3://models/model.safetensors", None)


def test_pickled_weights_are_not_fetched(store: ObjectStore):
    with pytest.raises(ModelError, match=r"write s3://BUCKET/KEY\.safetensors"):
        find_weights("s3://models/model.pt", None)
    assert store.requests == []


def tenant(monkeypatch, tmp_path: Path, name: str) -> None:
    """Be a pod of that namespace, with a folder of its own, on a node whose cache is shared."""
    monkeypatch.setenv("TRIMTAB_WEIGHTS_CACHE_TENANT", name)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "pods" / name))


def test_tenants_of_one_node_share_no_file(store: ObjectStore, monkeypatch, tmp_path):
    address = store.put("models", "model.safetensors", CONTENT)
    found = {}
    for name in ("one", "other", "one"):
        tenant(monkeypatch, tmp_path, name)
        found[name] = find_weights(address, DIGEST)

    assert found["one"] != found["other"]
    assert len(gets(store)) == 2


def test_tenant_without_access_gets_no_cached_weights(store: ObjectStore, monkeypatch, tmp_path):
    """Another pipeline of the same namespace, with the digest but without the right."""
    tenant(monkeypatch, tmp_path, "one")
    address = store.put("models", "model.safetensors", CONTENT)
    find_weights(address, DIGEST)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tenant")
    with pytest.raises(ModelError, match=r"InvalidAccessKeyId|AccessDenied"):
        find_weights(address, DIGEST)


def test_files_without_digest_are_not_shared_between_tenants(store: ObjectStore, monkeypatch, tmp_path):
    """A store of the tenant's own answers with whatever content tag it likes."""
    tenant(monkeypatch, tmp_path, "one")
    found = find_weights(store.put("models", "model.safetensors", CONTENT), None)

    assert isinstance(found, Path)
    assert found.is_relative_to(tmp_path / "pods" / "one")
    assert not cached(tmp_path)


def test_fetched_file_is_used_while_hub_is_down(running_hub):
    address = running_hub.put("owner/name", "sub/model.safetensors", CONTENT)
    first = find_weights(address, None)
    assert content(first) == CONTENT
    assert find_weights(address, None) == first
    assert len(gets(running_hub)) == 1

    running_hub.objects.clear()
    assert find_weights(address, None) == first


def test_a_file_above_the_bound_is_not_fetched(running_hub, tmp_path):
    address = running_hub.put("owner/name", "model.safetensors", CONTENT)
    with pytest.raises(ModelError, match=f"hf://owner/name/model.safetensors: {len(CONTENT)} bytes exceed the 10"):
        find_weights(address, None, FetchLimits(max_bytes=1000))
    assert not gets(running_hub)
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_file_of_a_commit_is_requested_once(running_hub, caplog):
    running_hub.put("owner/name", "model.safetensors", CONTENT, OTHER)
    running_hub.put("owner/name", "model.safetensors", save({"weight": torch.zeros(7)}))
    address = f"hf://owner/name@{OTHER}/model.safetensors"
    first = find_weights(address, None)

    assert content(first) == CONTENT
    running_hub.requests.clear()
    assert find_weights(address, None) == first
    assert not running_hub.requests
    assert "not pinned" not in caplog.text
    with pytest.raises(ModelError, match="bytes exceed the 10 allowed"):
        find_weights(address, None, FetchLimits(max_bytes=10))


@pytest.mark.parametrize("wrong", ["@", "@../main", "@a@b"])
def test_invalid_revision_is_rejected(running_hub, wrong):
    with pytest.raises(ModelError, match="is not a revision; give a commit, 40 hexadecimal digits, or a tag"):
        find_weights(f"hf://owner/name{wrong.replace('/', '%2F')}/model.safetensors", None)
    assert not running_hub.requests


def test_stalled_hub_fails_the_download(running_hub):
    address = running_hub.put("owner/name", "model.safetensors", CONTENT)
    running_hub.stall_after_bytes = 100
    with pytest.raises(ModelError, match=r"model.safetensors: no response in 0.5 s; is the Hub overloaded"):
        find_weights(address, None, FetchLimits(total_seconds=0.5))
    running_hub.objects.clear()
    running_hub.released.set()
    for thread in threading.enumerate():
        if thread.name == "hub":
            thread.join(20.0)
            assert not thread.is_alive()


def test_overloaded_hub_is_retried(running_hub):
    address = running_hub.put("owner/name", "model.safetensors", CONTENT)
    running_hub.overloaded_for = 3

    assert content(find_weights(address, None)) == CONTENT


def test_missing_file_on_hub_reports_404(running_hub):
    with pytest.raises(ModelError, match=r"hf://owner/name/absent.safetensors: .*NotFound.*404"):
        find_weights("hf://owner/name/absent.safetensors", None)
    assert len([request for request in running_hub.requests if request.startswith("HEAD")]) == 1


def test_hub_downloads_respect_the_cache_bound(running_hub, monkeypatch, tmp_path):
    first = find_weights(running_hub.put("owner/first", "model.safetensors", CONTENT), None)
    os.utime(tmp_path / "cache" / "hf" / "owner--first", (1, 1))
    monkeypatch.setenv("TRIMTAB_WEIGHTS_CACHE_BYTES", "1000")
    second = find_weights(running_hub.put("owner/second", "model.safetensors", CONTENT), None)

    assert isinstance(first, Path)
    assert isinstance(second, Path)
    assert (first.exists(), second.exists()) == (False, True)
