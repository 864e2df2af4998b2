"""IPA pipelines served on this machine: router, model servers, full-size light variants and real requests."""

from pathlib import Path

import aiohttp
import pytest
import yaml

from tests.builders import a_plan
from tests.ipa import FOLDER
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_loadtester.payloads.sources import payload_source
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol import InferRequest, InferResponse, rest

DEADLINE_MICROSECONDS = 60_000_000  # generous, since the machine may be busy


def light_pipeline(name: str, variants: tuple[str, ...], folder: Path) -> Path:
    """Write a pipeline with only these variants, one core a replica, for a machine of two cores."""
    document = yaml.safe_load((FOLDER / name / "pipeline.yaml").read_text())
    document["spec"]["budget"] = {"cores": "2"}
    for stage in document["spec"]["stages"]:
        stage["variants"] = [variant for variant in stage["variants"] if variant["name"] in variants]
        for variant in stage["variants"]:
            variant["resources"]["cpu"] = "1"
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


async def ask(pipeline: InferencePipeline, url: str, index: int) -> InferResponse:
    inputs = payload_source(pipeline, seed=3).payload(index).inputs
    parameters = {"timeout": DEADLINE_MICROSECONDS, "binary_data_output": True}
    buffers, header_length = rest.encode_request(InferRequest(pipeline.name, inputs, parameters=parameters))
    headers = {rest.HEADER_LENGTH: str(header_length), "Content-Type": rest.BINARY_CONTENT_TYPE}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v2/models/{pipeline.name}/infer", data=b"".join(buffers), headers=headers) as reply,
    ):
        body = await reply.read()
        assert reply.status == 200, body[:500]
        return rest.decode_response(body, reply.headers.get(rest.HEADER_LENGTH))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "variants", "shapes"),
    [
        (
            "video",
            ("yolov5n", "resnet18"),
            {"count": (1,), "boxes": (1, 4), "confidence": (1,), "label": (1,), "logits": (1, 1000)},
        ),
        (
            "sum-qa",
            ("distilbart-1-1", "roberta-base"),
            {"summary": (1, 16), "start": (1,), "end": (1,), "score": (1,)},
        ),
    ],
)
async def test_pipeline_is_served(tmp_path: Path, name, variants, shapes) -> None:
    path = light_pipeline(name, variants, tmp_path)
    pipeline = load_pipeline(path)
    async with Supervisor(Setup(path, tmp_path / "run", plan=a_plan(pipeline, batchSize=1))) as local:
        await local.ready()
        for index in range(2):
            reply = await ask(pipeline, f"http://127.0.0.1:{local.rest_port}", index)
            assert {tensor.name: tensor.shape for tensor in reply.outputs} == shapes
