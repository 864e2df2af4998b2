"""Devices: a variant that requests a GPU computes on it, or does not load.

The meta device stands for a GPU: it has no numbers, but rejects tensors of other devices.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.model_servers.test_model_adapters import a_spec
from tests.model_servers.transformer.test_family import SHAPE, spec
from tests.model_servers.transformer.test_family import weights as weights  # noqa: PLC0414  (a fixture)
from tests.model_servers.transformer.test_task_registry import a_task
from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.errors import InvalidRow, ModelError, RefusalError
from trimtab_model_servers.families.registry import build
from trimtab_model_servers.families.user_module import UserNetwork
from trimtab_model_servers.families.vision_transformer import ServedTransformer
from trimtab_model_servers.server import torch_model
from trimtab_model_servers.server.hosted_model import HostedModel, load_model
from trimtab_model_servers.server.torch_model import move_to_device, run
from trimtab_model_servers.transformer.config import preprocess
from trimtab_model_servers.transformer.merging import RULES
from trimtab_model_servers.weights.loading import CPU
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_protocol import InferRequest
from trimtab_protocol import Tensor as Wire

META = torch.device("meta")
POINT = OperatingPoint(accuracy=0.5)


@pytest.fixture
def card(monkeypatch):
    """A card that torch sees: what is brought there has shapes, and no numbers."""
    monkeypatch.setattr(torch_model, "GPU", META)
    return lambda: True


def test_gpu_is_used_if_requested_and_available(card):
    for gpus, where in [(1, META), (0, CPU)]:
        network = UserNetwork(nn.Linear(4, 2), ("y",))

        assert move_to_device(a_spec(gpus=gpus), network, card) == where
        assert network.module.weight.device == where
    with pytest.raises(ModelError, match="torch finds no GPU here"):
        move_to_device(a_spec(gpus=1), network, lambda: False)


def test_transformer_computes_on_its_device(card, weights, tmp_path):
    served = build(spec(weights, tasksFolder=str(tmp_path))).network
    assert isinstance(served, ServedTransformer)
    move_to_device(a_spec(gpus=1), served, card)
    a_task(tmp_path / "2-late.safetensors", weights)
    served.reload_tasks()
    images = torch.zeros(3, SHAPE.channels, SHAPE.side, SHAPE.side, dtype=torch.uint8, device=META)
    for ready in served.points.values():
        heads = served.active_tasks.banks[ready.prompt_variant].heads
        prompts = None if heads[0].prompts is None else heads[0].prompts.expand(3, -1, -1, -1)
        for rule in RULES.values():
            course = replace(ready.plan, rule=rule, prompts=prompts)
            features = served.transformer(preprocess(images, "ImageNet" if SHAPE.channels == 3 else "Image"), course)

            assert (features.device, features.shape) == (META, (3, SHAPE.width))
        assert {part.device for head in heads for part in (head.weight, head.bias)} == {META}
    assert served.active_tasks.bank_indices.device == META
    assert "late" in served.active_tasks.names


def test_family_without_gpu_support_rejects_gpu(card):
    with pytest.raises(ModelError, match="family 'echo' computes on cores alone"):
        load_model(a_spec(gpus=1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_metadata_of_gpu_variant_states_the_device(weights):
    assert load_model(spec(weights, gpus=1)).facts()["device"] == "cuda"
    assert "device" not in load_model(spec(weights)).facts()


def hosted(module: nn.Module, device: torch.device = CPU) -> HostedModel:
    network = UserNetwork(module, ("y",))
    return HostedModel(a_spec(), network, "none", partial(run, network, device))


async def test_invalid_row_is_the_callers_fault():
    class Strict(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.any():
                raise InvalidRow("x must be 0")
            return x

    model, worker = hosted(Strict()), BatchWorker()
    request = InferRequest("small", (Wire.of("x", torch.ones(1, 4).numpy()),))
    with pytest.raises(RefusalError, match="x must be 0") as refused:
        await model.infer(request, worker)
    worker.close()
    assert refused.value.status_code == 400


def test_inputs_are_moved_to_the_models_device():
    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.device == META
            return torch.zeros(len(x), 4)

    model = hosted(Watched(), META)
    (answer,), _ = model.compute([Wire.of("x", torch.ones(2, 4).numpy())], model.spec.operating_points[0], ["y"])
    assert answer.array.shape == (2, 4)
