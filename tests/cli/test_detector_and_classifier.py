"""A vision transformer behind a detector, both served: its point is chosen for the objects that the frames hold."""

import httpx
import numpy as np
import torch

from tests.builders import a_pipeline, a_stage, a_variant
from tests.model_servers.test_model_adapters import a_spec
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_model_servers.server.hosted_model import load_model
from trimtab_model_servers.transformer.checkpoints import Checkpoint, save
from trimtab_model_servers.transformer.config import ViTConfig
from trimtab_model_servers.transformer.tasks import Head
from trimtab_model_servers.transformer.transformer import VisionTransformer
from trimtab_pipelines.documents import dump_yaml, load_pipeline
from trimtab_pipelines.plan import PipelinePlan, initial_stage_plan
from trimtab_protocol import InferRequest, Tensor, rest

SHAPE = ViTConfig(side=224, patch=32, channels=3, width=16, depth=3, heads=2, inner=32)
CLASSES = 7
PIXELS = 64
POINTS = [{"name": "full", "accuracy": 0.9}, {"name": "fast", "accuracy": 0.8, "merging": {"schedule": [12]}}]
IMAGE = {"name": "image", "datatype": "UINT8", "shape": [3, PIXELS, PIXELS]}
CROPS = {"name": "crops", "datatype": "FP32", "shape": [3, 224, 224], "countedBy": "count", "expectedRows": 2}
LOGITS = {"name": "logits", "datatype": "FP32", "shape": [CLASSES]}
DETECTOR = a_variant(
    family="detector/n", parameters={"max_detections": 2}, resources={"cpu": "500m", "memory": "512Mi"}
)
VIT = a_variant(
    family="vision-transformer",
    storageUri="vit.safetensors",
    maxBatchSize=4096,
    resources={"cpu": "500m", "memory": "256Mi"},
    operatingPoints=POINTS,
)
STAGES = [
    a_stage(
        "detect",
        inputs=[{"name": "image", "from": "request.inputs.image"}],
        outputs=[{"name": "count", "datatype": "INT64"}, CROPS],
        variants=[DETECTOR],
    ),
    a_stage(
        "classify",
        inputs=[{"name": "image", "from": "detect.outputs.crops"}],
        outputs=[LOGITS],
        variants=[VIT],
    ),
]
OUTPUTS = {"count": "detect.outputs.count", "crops": "detect.outputs.crops", "logits": "classify.outputs.logits"}
PIPELINE = a_pipeline(
    STAGES,
    inputs=[IMAGE],
    outputs=[{"name": name, "from": source} for name, source in OUTPUTS.items()],
    slo={"latency": "60s"},
    budget={"cores": "2"},
    dropPolicy="Predicted",
    schedulingPolicy="TokenAdaptive",
)
FAST_SECONDS, FULL_SECONDS = 1.0, 40.0
"""As the plan has them: of two deadlines one leaves time for the better point, and one does not."""
MOST_ROWS = 4096
"""So many share what a batch takes, that no objects yet to come make the better point too dear."""


def write_classifier(path):
    torch.manual_seed(3)
    transformer = VisionTransformer(SHAPE).eval().requires_grad_(requires_grad=False)
    head = Head(torch.randn(CLASSES, SHAPE.width), torch.randn(CLASSES))
    save(Checkpoint(transformer, {"plain": {"kinds": head}}, {"kinds": tuple("abcdefg")}, "None"), path, {"seed": "3"})


def planned(pipeline):
    detect, classify = (initial_stage_plan(stage).model_copy(update={"cores": 0.5}) for stage in pipeline.spec.stages)
    points = {
        "batchSize": MOST_ROWS,
        "serviceSeconds": dict.fromkeys((1, MOST_ROWS), FULL_SECONDS),
        "fallbacks": [{"name": "fast", "accuracy": 0.8, "serviceSeconds": dict.fromkeys((1, MOST_ROWS), FAST_SECONDS)}],
    }
    stages = [detect.model_dump(by_alias=True), classify.model_dump(by_alias=True) | points]
    spec = {"pipeline": "sample", "generation": 1, "createdAt": 0, "stages": stages}
    return PipelinePlan.model_validate({"metadata": {"name": "sample"}, "spec": spec})


async def asked(client, url, frames, timeout_seconds):
    image = np.random.default_rng(7).integers(0, 256, (frames, 3, PIXELS, PIXELS), np.uint8)
    request = InferRequest(
        "sample",
        (Tensor.of("image", image),),
        parameters={"timeout": round(1e6 * timeout_seconds), "binary_data_output": True},
    )
    buffers, length = rest.encode_request(request)
    content = b"".join(map(bytes, buffers))
    answer = await client.post(url, content=content, headers={rest.HEADER_LENGTH: str(length)})
    assert answer.status_code == 200, answer.text
    return rest.decode_response(answer.content, answer.headers.get(rest.HEADER_LENGTH))


def directly(weights, point, crops):
    image = {"name": "image", "datatype": "FP32", "shape": [3, 224, 224]}
    model = load_model(
        a_spec(
            family="vision-transformer",
            storageUri=str(weights),
            inputs=[image],
            outputs=[LOGITS],
            operatingPoints=POINTS,
        )
    )
    chosen = model.spec.point(point)
    assert chosen is not None
    with torch.inference_mode():
        return model.network.infer({"image": torch.from_numpy(crops)}, chosen)["logits"].numpy()


async def test_point_is_chosen_for_the_deadline_of_a_frame(tmp_path):
    write_classifier(tmp_path / "vit.safetensors")
    (tmp_path / "pipeline.yaml").write_text(dump_yaml(PIPELINE))
    pipeline = load_pipeline(tmp_path / "pipeline.yaml")
    setup = Setup(tmp_path / "pipeline.yaml", tmp_path / "run", plan=planned(pipeline), proxy=False)
    async with Supervisor(setup) as local, httpx.AsyncClient(timeout=120, trust_env=False) as client:
        await local.ready()
        classified = {"fast": 0, "full": 0}
        for frames, seconds, point in [(1, FULL_SECONDS / 2, "fast"), (2, 6 * FULL_SECONDS, "full")]:
            url = f"http://127.0.0.1:{local.rest_port}/v2/models/sample/infer"
            response = await asked(client, url, frames, seconds)
            outputs = {one.name: one.array for one in response.outputs}
            objects = int(outputs["count"].sum())

            assert len(outputs["count"]) == frames
            assert objects > frames
            assert outputs["logits"].shape == (objects, CLASSES)
            assert response.parameters["trimtab.classify.operating_point"] == point
            assert response.parameters["trimtab.classify.batch_size"] == objects
            crops = outputs["crops"].copy()
            alike = {one["name"]: directly(tmp_path / "vit.safetensors", one["name"], crops) for one in POINTS}
            assert np.allclose(outputs["logits"], alike.pop(point), atol=1e-4)
            assert not np.allclose(outputs["logits"], next(iter(alike.values())), atol=1e-4)
            classified[point] += objects
        metrics = (await client.get(f"http://127.0.0.1:{local.admin_port}/metrics")).text

    for point, rows in classified.items():
        lines = [line for line in metrics.splitlines() if line.startswith("trimtab_operating_point_rows_total")]
        mine = [line for line in lines if 'stage="classify"' in line and f'"{point}"' in line]
        assert [float(line.split()[-1]) for line in mine] == [rows]
