"""Model folders from an object store or the Hub: indexed files, bounds, completeness."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.fakes.hub import COMMIT, Hub
from tests.fakes.object_store import ObjectStore
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.weights.cache import link_files, linked_folder
from trimtab_model_servers.weights.files import FetchLimits, referenced_files
from trimtab_model_servers.weights.source import find_folder

OTHER = "f" * 40
SHARDS = {f"model-{number}.safetensors": save({f"w{number}": torch.full((9,), number)}) for number in (1, 2)}
INDEX = json.dumps({"weight_map": {f"w{name[6]}": name for name in SHARDS}}).encode()
SEVERAL = {"config.json": b"{}", "tokenizer.json": b"{ }", "model.safetensors.index.json": INDEX, **SHARDS}
ONE = {"config.json": b"{}", "tokenizer.json": b"{ }", "model.safetensors": SHARDS["model-1.safetensors"]}
Put = Callable[[dict[str, bytes]], str]


@pytest.fixture(params=["store", "running_hub"])
def place(request) -> ObjectStore:
    found: ObjectStore = request.getfixturevalue(request.param)
    return found


def put(place: ObjectStore, files: dict[str, bytes]) -> str:
    bucket, prefix = ("owner/name", "") if isinstance(place, Hub) else ("models", "small/")
    for file, content in files.items():
        place.put(bucket, prefix + file, content)
    return "hf://owner/name" if isinstance(place, Hub) else "s3://models/small"


def contents(folder: Path | None) -> dict[str, bytes]:
    assert folder is not None
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def gets(place: ObjectStore) -> int:
    return sum(request.startswith("GET ") for request in place.requests)


@pytest.mark.parametrize("files", [SEVERAL, ONE])
def test_indexed_files_of_a_folder_are_fetched_once(place, files):
    address = put(place, files | {"pytorch_model.bin": b"pickled", "other.safetensors": b"not of the model"})
    first = find_folder(address, None)
    asked = gets(place)

    assert contents(first) == files
    assert find_folder(address, None) == first
    assert gets(place) == asked


def test_folder_includes_chat_files(place):
    files = ONE | {"chat_template.jinja": b"{{ messages }}", "tokenizer_config.json": b'{"bos_token": "<s>"}'}

    assert contents(find_folder(put(place, files), None)) == files


@pytest.mark.parametrize("absent", ["config.json", "model-2.safetensors"])
def test_missing_file_of_a_folder_is_named(place, absent, weights_cache):
    address = put(place, {file: content for file, content in SEVERAL.items() if file != absent})
    with pytest.raises(ModelError, match=absent):
        find_folder(address, None)
    assert not list(weights_cache.glob(".folders/*"))


def test_single_file_folder_is_fetched_without_list_permission(store):
    store.may_list = False

    assert contents(find_folder(put(store, ONE), None)) == ONE


def test_folder_created_by_another_process_is_used(weights_cache, tmp_path):
    (tmp_path / "weights").write_bytes(b"w")
    made = linked_folder({"model.safetensors": tmp_path / "weights"})
    link_files({"model.safetensors": tmp_path / "weights"}, made)

    assert contents(made) == {"model.safetensors": b"w"}


def test_folder_above_the_bound_is_not_fetched(place):
    address = put(place, SEVERAL)
    total = sum(len(content) for content in SHARDS.values())
    with pytest.raises(ModelError, match=f"its files have [0-9]+ bytes, above the {total - 1} allowed"):
        find_folder(address, None, FetchLimits(max_folder_bytes=total - 1))
    assert not any(name in request for request in place.requests if request[:3] == "GET" for name in SHARDS)


def test_file_of_a_folder_is_bounded(place):
    with pytest.raises(ModelError, match="bytes exceed the 50 allowed"):
        find_folder(put(place, SEVERAL), None, FetchLimits(max_bytes=50))


def test_digest_of_a_folder_is_rejected(place, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for address in (put(place, SEVERAL), str(tmp_path)):
        with pytest.raises(ModelError, match="this is a folder; a digest is of one file"):
            find_folder(address, f"sha256:{'0' * 64}")
    assert not place.requests


@pytest.mark.parametrize("address", ["s3://models/a.safetensors", "hf://owner/name/a.safetensors", "hf://owner"])
def test_file_uri_is_not_a_folder(address):
    assert find_folder(address, None) is None


def test_replaced_object_gives_another_folder(store):
    first = find_folder(put(store, SEVERAL), None)
    second = find_folder(put(store, {"config.json": b'{"changed": 1}'}), None)

    assert contents(first) == SEVERAL  # who has it open keeps it whole
    assert contents(second) == SEVERAL | {"config.json": b'{"changed": 1}'}


def test_evicted_file_is_fetched_again(store):
    address = put(store, SEVERAL)
    folder = find_folder(address, None)
    assert folder is not None
    (folder / "model-1.safetensors").resolve().unlink()

    assert contents(find_folder(address, None)) == SEVERAL


@pytest.mark.parametrize("files", [SEVERAL, ONE])
def test_cached_repository_is_used_while_hub_is_down(running_hub, files):
    address = put(running_hub, files)
    first = find_folder(address, None)
    running_hub.overloaded_for = 10**6

    assert find_folder(address, None) == first


def test_repository_files_are_of_one_commit(running_hub):
    find_folder(put(running_hub, SEVERAL), None)
    fetched = [request.split()[1] for request in running_hub.requests if request.startswith("GET ")]

    assert [path.rpartition("/")[2] for path in fetched][-1] == "config.json"
    assert all(f"/resolve/{COMMIT}/" in path for path in fetched[:-1])


def test_repository_of_a_commit_is_not_requested_again(running_hub, caplog):
    put(running_hub, SEVERAL | {"config.json": b'{"newest": 1}'})
    for file, content in (ONE | {"chat_template.jinja": b"{{ messages }}"}).items():
        running_hub.put("owner/name", file, content, OTHER)
    first = find_folder(f"hf://owner/name@{OTHER}", None)

    assert contents(first) == ONE | {"chat_template.jinja": b"{{ messages }}"}
    running_hub.requests.clear()
    assert find_folder(f"hf://owner/name@{OTHER}", None) == first
    assert not running_hub.requests
    assert "not pinned" not in caplog.text
    find_folder("hf://owner/name", None)
    assert f"hf://owner/name: not pinned: it is commit {COMMIT} now" in caplog.text


def test_partial_repository_is_not_used(running_hub):
    address = put(running_hub, {file: content for file, content in SEVERAL.items() if file != "model-2.safetensors"})
    with pytest.raises(ModelError, match="model-2"):
        find_folder(address, None)
    running_hub.objects.clear()
    with pytest.raises(ModelError, match=r"config\.json"):
        find_folder(address, None)


@pytest.mark.parametrize("file", ["../../etc/passwd.safetensors", "/a.safetensors", "sub/a.safetensors", "a.bin", ""])
def test_index_with_foreign_files_is_rejected(file):
    with pytest.raises(ModelError, match=r"somewhere: .*lists .*should be .safetensors files of its folder"):
        referenced_files(json.dumps({"weight_map": {"w": file}}).encode(), "somewhere")


@pytest.mark.parametrize("index", [b"", b"[]", b'{"weight_map": 3}', b'{"weight_map": {}}', b"[" * 10**5])
def test_invalid_index_is_rejected(index):
    with pytest.raises(ModelError, match=r"somewhere: model.safetensors.index.json (is not an index|lists 0 files)"):
        referenced_files(index, "somewhere")
