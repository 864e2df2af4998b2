"""Plugin families, validated before weights are fetched."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.model_servers.test_model_adapters import a_spec, run
from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_model_servers.families import registry
from trimtab_model_servers.server.hosted_model import load_model
from trimtab_protocol import InferRequest, Tensor

SOURCE = """
import torch


class Scale(torch.nn.Module):
    inputs = {"x": ("FP32", (4,))}
    outputs = {"y": ("FP32", (4,))}

    def __init__(self, factor: float = 2.0):
        super().__init__()
        self.factor = factor
        self.weight = torch.nn.Parameter(torch.rand(4))

    def forward(self, x):
        return factor_of(self) * self.weight * x


class Fails(Scale):
    def forward(self, x):
        if x.any():
            raise AttributeError("no such thing")
        return x


class Silent(torch.nn.Module):
    outputs = {"y": ("FP32", (4,))}


class Two(Scale):
    outputs = {"y": ("FP32", (4,)), "z": ("FP32", (4,))}


class Resized(Scale):
    knobs = {"inputSize"}

    def infer(self, inputs, point):
        side = point.input_size.resolution if point.input_size else 0
        return {"y": inputs["x"] + side}


def factor_of(module):
    return module.factor


number = 3
"""


@pytest.fixture(autouse=True)
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of the user's, importable."""
    (tmp_path / "acme_models.py").write_text(SOURCE)
    (tmp_path / "acme_broken.py").write_text("import nothing_of_that_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("acme_models", None)


def test_plugin_by_import_path_is_served(tmp_path: Path):
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    weights = str(tmp_path / "model.safetensors")
    spec = a_spec(family="acme_models:Scale", storageUri=weights, parameters={"factor": 10.0})
    assert run(spec, x=torch.ones(2, 4))["y"].tolist() == [[10.0, 20.0, 30.0, 40.0]] * 2
    assert load_model(spec).weights == "stored"


def test_plugin_reads_the_operating_point():
    points = [{"accuracy": 0.9}, {"name": "small", "accuracy": 0.8, "inputSize": {"resolution": 7}}]
    spec = a_spec(family="acme_models:Resized", operatingPoints=points)
    assert load_model(spec).network.infer({"x": torch.zeros(1, 4)}, spec.operating_points[1])["y"][0, 0] == 7
    unsupported = "'acme_models:Scale' does not support inputSize, which operating point 'small' sets"
    with pytest.raises(ModelError, match=unsupported):
        load_model(a_spec(family="acme_models:Scale", operatingPoints=points))


@pytest.mark.parametrize(
    ("family", "changes", "complaint"),
    [
        (
            "acme/embedder",
            {},
            "unknown family 'acme/embedder'; give one of your own as package.module:Class; there are",
        ),
        ("no_such_package.models:Scale", {}, "no module 'no_such_package'; install it in trimtab's environment"),
        ("acme_broken:Scale", {}, "importing acme_broken: ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        ("acme_models:Skale", {}, "acme_models has no 'Skale'; it has: Fails, Resized, Scale"),
        ("acme_models:number", {}, "neither a subclass of torch.nn.Module nor has it `build"),
        ("acme_models:Silent", {}, "acme_models:Silent.inputs is missing; declare it as a class attribute"),
        ("acme_models:Scale", {"parameters": {"facter": 1}}, "facter'; there are: factor"),
        (
            "acme_models:Scale",
            {"inputs": [{"name": "image", "datatype": "FP32", "shape": [4]}]},
            "it reads: x, its stage's inputs are: image",
        ),
        (
            "acme_models:Scale",
            {"outputs": [{"name": "y", "datatype": "FP32", "shape": [5]}]},
            r"returns 'y' as FP32 \[4\], but its stage has it as FP32 \[5\]",
        ),
        (
            "acme_models:Scale",
            {"outputs": [{"name": "z", "datatype": "FP32", "shape": [4]}]},
            "returns no 'z'; it returns: y",
        ),
        ("acme_models:Two", {"storageUri": "random://"}, "Two returned 1 tensors, not y, z"),
    ],
)
def test_invalid_plugin_is_rejected_before_weights_are_fetched(family, changes, complaint):
    weights = {"storageUri": "/nowhere/weights.safetensors"}  # who looked for these would complain of them instead
    with pytest.raises(ModelError, match=complaint):
        load_model(a_spec(family=family, **(weights | changes)))


async def test_exception_of_a_plugin_fails_only_its_batch():
    model = load_model(a_spec(family="acme_models:Fails"))
    request = InferRequest("small", (Tensor.of("x", torch.ones(1, 4).numpy()),))
    with pytest.raises(RefusalError, match="no such thing") as refused:
        await model.infer(request, BatchWorker())
    assert refused.value.status_code == 500


def test_entry_points_provide_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As pip writes it: the entry points of a distribution."""
    info = tmp_path / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trimtab.families]\nacme/scale = acme_models:Scale\n")
    registry.plugin_entry_points.cache_clear()
    try:
        assert run(a_spec(family="acme/scale"), x=torch.ones(1, 4))["y"].shape == (1, 4)
        with pytest.raises(ModelError, match="acme/scale"):
            load_model(a_spec(family="acme/other"))
    finally:
        registry.plugin_entry_points.cache_clear()
