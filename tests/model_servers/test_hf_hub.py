"""Weights from the Hub, by its own client."""

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.fakes.hub import Hub
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.weights.files import FetchLimits
from trimtab_model_servers.weights.source import find_weights

OTHER = "f" * 40
CONTENT = save({"weight": torch.arange(1000, dtype=torch.float32)})


def gets(running_hub: Hub) -> int:
    """How often a file was asked for, besides what the client likes to know."""
    return sum(request.startswith("GET ") and "/resolve/" in request for request in running_hub.requests)


def test_fetched_file_is_used_while_hub_is_down(running_hub):
    address = running_hub.put("owner/name", "sub/model.safetensors", CONTENT)
    first = find_weights(address, None)
    assert isinstance(first, Path)
    assert first.read_bytes() == CONTENT
    assert find_weights(address, None) == first
    assert gets(running_hub) == 1

    running_hub.objects.clear()
    assert find_weights(address, None) == first


def test_a_file_above_the_bound_is_not_fetched(running_hub, tmp_path):
    address = running_hub.put("owner/name", "model.safetensors", CONTENT)
    with pytest.raises(ModelError, match=f"hf://owner/name/model.safetensors: {len(CONTENT)} bytes exceed the 10"):
        find_weights(address, None, FetchLimits(max_bytes=1000))
    assert gets(running_hub) == 0
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_file_of_a_commit_is_requested_once(running_hub, caplog):
    running_hub.put("owner/name", "model.safetensors", CONTENT, OTHER)
    running_hub.put("owner/name", "model.safetensors", save({"weight": torch.zeros(7)}))
    address = f"hf://owner/name@{OTHER}/model.safetensors"
    first = find_weights(address, None)

    assert isinstance(first, Path)
    assert first.read_bytes() == CONTENT
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
    found = find_weights(address, None)

    assert isinstance(found, Path)
    assert found.read_bytes() == CONTENT


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
