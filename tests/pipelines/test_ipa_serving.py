"""IPA pipelines served on this machine: router, model servers, full-size light variants and real requests."""

from pathlib import Path

import aiohttp
import pytest
import yaml

from tests.builders import a_plan
from tests.ipa import cut_pipeline
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_loadtester.payloads.sources import payload_source
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol import InferRequest, InferResponse, rest

DEADLINE_MICROSECONDS = 60_000_000  # generous, since the machine may be busy


def write(pipeline: InferencePipeline, folder: Path) -> Path:
    path = folder / "pipeline.yaml"
    path.write_text(yaml.safe_dump(pipeline.model_dump(mode="json", by_alias=True, exclude_none=True)))
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


async def answers(pipeline: InferencePipeline, folder: Path, count: int) -> list[dict[str, tuple[int, ...]]]:
    """Serve it, ask `count` times, and tell the shape of each output."""
    plan = a_plan(pipeline, batchSize=1)
    async with Supervisor(Setup(write(pipeline, folder), folder / "run", plan=plan)) as local:
        await local.ready()
        replies = [await ask(pipeline, f"http://127.0.0.1:{local.rest_port}", index) for index in range(count)]
    return [{tensor.name: tensor.shape for tensor in reply.outputs} for reply in replies]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_video_is_served(tmp_path: Path) -> None:
    shapes = await answers(cut_pipeline("video", "yolov5n", "resnet18"), tmp_path, count=2)

    expected = {"count": (1,), "boxes": (1, 4), "confidence": (1,), "label": (1,), "logits": (1, 1000)}
    assert shapes == [expected, expected]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_sum_qa_is_served(tmp_path: Path) -> None:
    shapes = await answers(cut_pipeline("sum-qa", "distilbart-1-1", "roberta-base"), tmp_path, count=2)

    expected = {"summary": (1, 16), "start": (1,), "end": (1,), "score": (1,)}
    assert shapes == [expected, expected]
