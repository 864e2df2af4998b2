import hashlib
import sys

import pytest
import torch
from safetensors.torch import save_file

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.weights.loading import load_weights
from trimtab_model_servers.weights.source import RandomSeed, find_weights, take_credentials


def a_layer() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


def saved(path, **changes):
    tensors = {name: tensor + 1 for name, tensor in a_layer().state_dict().items()} | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return path


def test_a_folder_with_one_file_is_enough(tmp_path):
    path = saved(tmp_path / "model.safetensors")
    digest = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert find_weights(str(tmp_path), digest) == path
    assert find_weights(path.as_uri(), None) == path


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("absent.safetensors", "absent.safetensors: no such weights; correct storageUri"),
        ("pickled.pt", "pickled.pt: only .safetensors files are read"),
        ("empty", "empty: expected one .safetensors file in this folder, found 0"),
        ("two", "two: expected one .safetensors file in this folder, found 2"),
    ],
)
def test_unusable_files_are_rejected(tmp_path, uri, message):
    (tmp_path / "pickled.pt").write_bytes(b"\x80\x04.")
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        saved(tmp_path / "two" / f"{name}.safetensors")
    with pytest.raises(ModelError, match=message):
        find_weights(str(tmp_path / uri), None)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("ftp://host/model.safetensors", "unknown scheme 'ftp'; write a path, file://PATH, s3://"),
        ("random://?seed=-1", "the seed must be an integer of at least 0"),
        ("hf://owner/name/model.bin", "write hf://OWNER/NAME/FILE.safetensors"),
        ("hf://model.safetensors", "write hf://OWNER/NAME/FILE.safetensors"),
    ],
)
def test_invalid_uris_are_rejected(uri, message):
    with pytest.raises(ModelError, match=message):
        find_weights(uri, None)


def test_hub_uri_requires_its_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as where it is not installed

    with pytest.raises(ModelError, match="needs huggingface_hub: pip install huggingface_hub"):
        find_weights("hf://owner/name/model.safetensors", None)


def test_wrong_digest_is_reported_with_both(tmp_path):
    path = saved(tmp_path / "model.safetensors")
    wrong = f"sha256:{'0' * 64}"
    with pytest.raises(ModelError, match=f"model.safetensors: the weights have digest sha256:.*, but {wrong}"):
        find_weights(str(path), wrong)


def test_a_seed():
    assert find_weights("random://?seed=7", None) == RandomSeed(7)
    assert find_weights("random://", None) == RandomSeed(0)


def test_half_precision_or_missing_counter_tensors_are_loaded(tmp_path):
    half = torch.full((2, 3), 0.5, dtype=torch.float16)
    path = saved(tmp_path / "model.safetensors", **{"0.weight": half, "1.num_batches_tracked": None})
    with torch.device("meta"):
        module = a_layer()
    load_weights(module, path)
    state = module.state_dict()
    assert state["0.weight"].dtype == torch.float32
    assert torch.equal(state["0.weight"], half.float())
    assert int(state["1.num_batches_tracked"]) == 0


def test_module_with_unfilled_tensors_is_rejected(tmp_path):
    path = saved(tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = a_layer()
        module.register_buffer("positions", torch.arange(3), persistent=False)
    with pytest.raises(ModelError, match=r"model.safetensors: 'positions' is in no file"):
        load_weights(module, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"0.bias": None}, r"tensor '0.bias' is missing; it must be there with shape \[2\]"),
        ({"0.weight": torch.zeros(3, 3)}, r"tensor '0.weight' has shape \[3, 3\]; it must be \[2, 3\]"),
        ({"9.weight": torch.zeros(1)}, r"tensor '9.weight' is not part of this architecture \(1 such"),
    ],
)
def test_mismatched_tensors_are_rejected(tmp_path, changes, message):
    path = saved(tmp_path / "model.safetensors", **changes)
    with pytest.raises(ModelError, match=f"model.safetensors: {message}"):
        load_weights(a_layer(), path)


@pytest.mark.parametrize("keep", [0, 7, 40, -1])
def test_a_file_cut_short(tmp_path, keep):
    path = saved(tmp_path / "model.safetensors")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model.safetensors: not a complete safetensors file"):
        load_weights(a_layer(), path)


def test_only_known_credentials_are_taken_from_a_secret():
    environment = {
        "PATH": "/usr/bin",
        "AWS_REGION": "eu-central-1",
        "TRIMTAB_SECRET_AWS_ACCESS_KEY_ID": "reader",
        "TRIMTAB_SECRET_AWS_ENDPOINT_URL": "http://minio:9000",
        "TRIMTAB_SECRET_PYTHONPATH": "/weights",
        "TRIMTAB_SECRET_LD_PRELOAD": "/weights/evil.so",
        "TRIMTAB_SECRET_HTTPS_PROXY": "http://proxy:3128",
        "TRIMTAB_SECRET_PATH": "/weights",
        "TRIMTAB_SECRET_TRIMTAB_WEIGHTS_CACHE": "/",
    }
    take_credentials(environment)

    assert environment == {
        "PATH": "/usr/bin",
        "AWS_REGION": "eu-central-1",
        "AWS_ACCESS_KEY_ID": "reader",
        "AWS_ENDPOINT_URL": "http://minio:9000",
    }
