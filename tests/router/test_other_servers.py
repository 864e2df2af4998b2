"""Third-party model servers in `container:` variants: model names, JSON or binary, no parameters."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from tests.builders import a_stage
from tests.processes import held_port
from tests.router.fakes import PATIENT, a_pipeline, a_request, a_rig
from trimtab_pipelines.endpoints import Endpoint, Endpoints
from trimtab_protocol import InferRequest, InferResponse, Tensor, rest

REPOSITORY = Path(__file__).parents[2]


@asynccontextmanager
async def plain_mlserver(folder: Path) -> AsyncIterator[int]:
    """Stock MLServer with a runtime as a user would write it; yields its REST port."""
    with held_port() as http_port, held_port() as grpc_port:
        model = {"name": "their-name", "implementation": "benchmarks.router.mlserver_model.PlusOne"}
        (folder / "model-settings.json").write_text(json.dumps(model))
        settings = {"host": "127.0.0.1", "http_port": http_port, "grpc_port": grpc_port, "parallel_workers": 0}
        (folder / "settings.json").write_text(json.dumps(settings | {"metrics_endpoint": None}))
        process = await asyncio.create_subprocess_exec(
            *(str(Path(sys.executable).parent / "mlserver"), "start", str(folder)),
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            yield http_port
        finally:
            process.terminate()
            await process.wait()


def at(port: int) -> Endpoints:
    names = {"small": "their-name"}
    endpoint = Endpoint(name="theirs", address=f"127.0.0.1:{port}", variants=("small",), model_names=names)
    return Endpoints(stages={"stage-0": (endpoint,)})


@pytest.mark.timeout(300)
async def test_a_plain_mlserver_serves_a_stage(tmp_path: Path):
    async with plain_mlserver(tmp_path) as port, a_rig(a_pipeline(1), {"stage-0": []}, ready=False) as rig:
        rig.router.apply_endpoints(at(port))
        async with asyncio.timeout(240):
            while not rig.router.ready:  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.05)
        answers = await asyncio.gather(*(rig.rest(a_request(2, float(n), parameters=PATIENT)) for n in range(20)))

        for n, (status, answer, _) in enumerate(answers):
            assert status == 200, answer
            np.testing.assert_array_equal(answer.outputs[0].array, np.full((2, 4), n + 1, np.float32))
            assert answer.outputs[0].array.dtype == np.float32
        assert await rig.outcomes() == {"ok": 20}


class TheirServer:
    """A server that says which extensions it has, calls its model by a name of its own and adds no parameters."""

    def __init__(self, *extensions: str) -> None:
        self.extensions = extensions
        self.binary: list[bool] = []
        self.paths: set[str] = set()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        self.paths.add(request.path)
        if request.path == "/v2":
            return web.json_response({"name": "theirs", "version": "1", "extensions": list(self.extensions)})
        if request.path == "/v2/models/their-name/ready":
            return web.json_response({"name": "their-name", "ready": True})
        length = request.headers.get(rest.HEADER_LENGTH)
        asked = rest.decode_request("their-name", await request.read(), length)
        self.binary.append(length is not None)
        outputs = (Tensor.of("y", asked.inputs[0].array + np.float32(1)),)
        answer = InferResponse("their-name", outputs)
        buffers, length_out = rest.encode_response(answer, frozenset({"y"} if length else ()))
        headers = {rest.HEADER_LENGTH: str(length_out)} if length_out else {}
        return web.Response(body=b"".join(buffers), headers=headers)


@pytest.mark.parametrize("extensions", [("binary_tensor_data", "statistics"), ("model_repository_extension",), ()])
async def test_tensors_are_binary_or_as_large_as_json_makes_them(extensions):
    theirs, width = TheirServer(*extensions), 100
    any_row = {"datatype": "FP32", "shape": [width]}
    stage = a_stage("stage-0", outputs=[{"name": "y", **any_row}])
    pipeline = a_pipeline([stage], inputs=[{"name": "x", **any_row}])
    async with RawTestServer(theirs) as server, a_rig(pipeline, {"stage-0": []}, ready=False, batchSize=64) as rig:
        assert server.port is not None
        rig.router.apply_endpoints(at(server.port))
        await rig.until_ready()
        x = np.full((64, width), 0.1, np.float32)
        parameters = PATIENT | {"binary_data_output": True}
        status, answer, _ = await rig.rest(InferRequest("sample", (Tensor.of("x", x),), parameters=parameters))

        assert status == 200, answer
        np.testing.assert_array_equal(answer.outputs[0].array, x + np.float32(1))
        assert answer.parameters["trimtab.stage-0.operating_point"] == "default"
    assert theirs.binary == ["binary_tensor_data" in extensions]
    assert theirs.paths == {"/v2", "/v2/models/their-name/ready", "/v2/models/their-name/infer"}
