"""Pretrained models fetched from an object store and the Hub."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.model_servers.chat.chat_client import a_chat, a_chat_spec, text_of
from tests.model_servers.chat.module_parameters import parameters_within
from tests.model_servers.chat.test_hf_vlm import SIZES, TINY, a_photo, loaded, stored
from tests.model_servers.minio import ACCESS_KEY, SECRET_KEY, minio
from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.hf_vlm.family import build

NAME = "internvl3-8b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = stored(NAME, tmp_path_factory.mktemp("model"))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3]}))
    return folder


@pytest.fixture
def from_store(folder, monkeypatch, tmp_path) -> Iterator[str]:
    with minio(tmp_path) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        for file in folder.iterdir():
            store.put("models", f"published/InternVL3-8B/{file.name}", file)
        yield "s3://models/published/InternVL3-8B"


@pytest.fixture
def from_hub(folder, running_hub) -> str:
    for file in folder.iterdir():
        running_hub.put("OpenGVLab/InternVL3-8B-hf", file.name, file.read_bytes())
    return "hf://OpenGVLab/InternVL3-8B-hf"


@pytest.mark.parametrize("place", ["from_store", "from_hub"])
async def test_fetched_model_equals_its_folder(place, folder, monkeypatch, tmp_path, request):
    monkeypatch.setenv("TRIMTAB_WEIGHTS_CACHE", str(tmp_path / "cache"))
    address, asked = request.getfixturevalue(place), a_chat("colocated", "?", a_photo(*SIZES[1]), max_tokens=8)
    answers = []
    for where in (address, str(folder)):
        hosted = loaded(NAME, storageUri=where)
        answers.append(text_of(await hosted.infer(asked, BatchWorker())))
        assert (hosted.weights, hosted.facts()["images"]) == ("stored", "stored")
        await hosted.close()

    assert answers[0] == answers[1]
    fetched, put = (
        parameters_within(
            build(a_chat_spec("colocated", family=f"{NAME}/colocated", parameters=TINY, storageUri=where))
        )
        for where in (address, str(folder))
    )
    assert all(torch.equal(one, other) for one, other in zip(fetched, put, strict=True))


def test_a_digest_of_a_folder_is_refused(folder):
    spec = a_chat_spec(
        "encode", family=f"{NAME}/encode", parameters=TINY, storageUri=str(folder), digest=f"sha256:{'0' * 64}"
    )
    with pytest.raises(ModelError, match="a digest is of one file"):
        build(spec)
