"""Throughput and memory of a replica that serves a checkpoint of ordinary size, beside transformers in a loop."""

import io
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from PIL import Image

from tests.builders import a_pipeline_document, a_variant
from tests.figures import Figures
from tests.model_servers.clients import a_request, call
from tests.model_servers.conftest import Replica
from tests.model_servers.hf.rows import Rows, some_images, some_texts
from trimtab_model_servers.families.hf.miniatures import VOCABULARY, save, word_tokenizer
from trimtab_model_servers.server.settings import write_model_folder
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol import Tensor
from trimtab_protocol.tensors import bytes_array

pytestmark = [pytest.mark.endurance, pytest.mark.timeout(600)]

hf: Any = import_module("transformers")
BATCH, TURNS, MIN_RATIO = 16, 15, 0.95
Compute = Callable[[Rows], Any]


def distilbert(folder: Path) -> Compute:
    """Write DistilBERT at its published size; return the same model as transformers runs it."""
    save(folder, hf.DistilBertForSequenceClassification(hf.DistilBertConfig(vocab_size=VOCABULARY)), word_tokenizer())
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()

    def compute(rows: Rows) -> Any:
        tokens = tokenizer([row.decode() for row in rows], padding=True, return_tensors="pt")
        return model(**tokens).logits.argmax(-1)

    return compute


def vit_small(folder: Path) -> Compute:
    """Write ViT-S/16 at its published size; return the same model as transformers runs it."""
    config = hf.ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536)
    save(folder, hf.ViTForImageClassification(config), hf.ViTImageProcessor())
    processor = hf.AutoImageProcessor.from_pretrained(folder)
    model = hf.AutoModelForImageClassification.from_pretrained(folder).eval()

    def compute(rows: Rows) -> Any:
        images = [Image.open(io.BytesIO(row)).convert("RGB") for row in rows]
        return model(**processor(images, return_tensors="pt")).logits.argmax(-1)

    return compute


@pytest.mark.parametrize(
    ("task", "tensor", "write", "rows"),
    [
        pytest.param("text-classification", "text", distilbert, some_texts(BATCH), id="texts"),
        pytest.param("image-classification", "image", vit_small, some_images(BATCH), id="images"),
    ],
)
async def test_full_batches_are_as_quick_as_transformers(
    *,
    task: str,
    tensor: str,
    write: Callable[[Path], Compute],
    rows: Rows,
    start: Callable[[Path], Replica],
    tmp_path: Path,
    figures: Figures,
):
    compute = write(tmp_path / "checkpoint")
    variant = a_variant("plain", family=f"hf/{task}", storageUri="checkpoint", maxBatchSize=BATCH)
    document = a_pipeline_document([{"name": "first", "variants": [variant]}])
    document["spec"] = {name: value for name, value in document["spec"].items() if name not in {"inputs", "outputs"}}
    pipeline = InferencePipeline.model_validate(document)
    write_model_folder(pipeline, tmp_path, "first", ["plain"], tmp_path / "replica", cores=1)
    replica = start(tmp_path / "replica")
    assert isinstance(replica, Replica), replica
    request = a_request("plain", Tensor(tensor, "BYTES", bytes_array(rows, (len(rows),))))
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"transformers": [], "replica": []}
    async with aiohttp.ClientSession() as session:
        for _ in range(TURNS):
            began = time.perf_counter()
            with torch.inference_mode():
                compute(rows)
            seconds["transformers"].append(time.perf_counter() - began)
            began = time.perf_counter()
            assert (await call(session, replica.ports, request)).status == 200
            seconds["replica"].append(time.perf_counter() - began)

    mib = psutil.Process(replica.process.pid).memory_full_info().pss / 2**20
    figures.add(
        batch=BATCH, replica_pss_mib=round(mib), **{f"{name}_seconds": median(s) for name, s in seconds.items()}
    )
    ratio = median(bare / served for bare, served in zip(*seconds.values(), strict=True))
    figures.require("rows/s relative to transformers", round(ratio, 3), ">=", MIN_RATIO, depends_on_load=True)
