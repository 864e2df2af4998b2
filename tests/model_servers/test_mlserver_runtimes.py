"""Runtimes of MLServer as variants: scikit-learn's, and a user's own; the errors of those that cannot serve."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from tests.fakes.object_store import ObjectStore
from tests.model_servers.test_model_adapters import a_spec
from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.errors import ModelError, RefusalError
from trimtab_model_servers.families.registry import modules_to_preload
from trimtab_model_servers.server.hosted_model import load_model
from trimtab_pipelines.model_spec import model_spec
from trimtab_protocol import InferRequest, Tensor
from trimtab_protocol.tensors import bytes_array

Ask = Callable[[Any, Any], Awaitable[dict[str, Any]]]
SKLEARN = "mlserver_sklearn.SKLearnModel"
SOURCE = """
from mlserver import MLModel
from mlserver.codecs import NumpyCodec, StringCodec
from mlserver.errors import InferenceError
from mlserver.types import InferenceResponse


class Upper(MLModel):
    async def predict(self, payload):
        texts = self.decode(payload.inputs[0], default_codec=StringCodec)
        if "bad" in texts:
            raise InferenceError("a text is bad")
        if "broken" in texts:
            raise AttributeError("no such thing")
        suffix = self.settings.parameters.extra["suffix"]
        return InferenceResponse(
            model_name=self.name, outputs=[StringCodec.encode_output("y", [text.upper() + suffix for text in texts])]
        )


class Frame(MLModel):
    async def predict(self, payload):
        frame = self.decode_request(payload)
        total = frame.sum(axis=1).to_numpy()
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", total)])


class Unready(MLModel):
    async def load(self):
        return False


class Failing(MLModel):
    async def load(self):
        raise OSError("no disk")


number = 3
"""


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """A process that imports MLServer; its messages clash with those of tritonclient, which other tests import."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def ask(process: ProcessPoolExecutor, tmp_path: Path) -> Ask:
    (tmp_path / "acme_runtimes.py").write_text(SOURCE)

    async def ask(spec: Any, array: Any) -> dict[str, Any]:
        answer = await asyncio.wrap_future(process.submit(infer, str(tmp_path), dict(os.environ), spec, array))
        if isinstance(answer, Failure):
            raise answer
        return answer

    return ask


class Failure(Exception):
    """An error of the other process: its message, class and HTTP status."""

    def __init__(self, message: str, kind: str, status: int | None) -> None:
        super().__init__(message, kind, status)
        self.message, self.kind, self.status = message, kind, status

    def __str__(self) -> str:
        return self.message


def infer(folder: str, environment: dict[str, str], spec: Any, array: Any) -> dict[str, Any] | Failure:
    """Load a model and compute one batch; `folder` has the user's own runtimes."""
    os.environ.update(environment)
    sys.modules.pop("acme_runtimes", None)
    sys.path.insert(0, folder)
    try:
        return asyncio.run(_infer(spec, array))
    except (ModelError, RefusalError) as error:
        return Failure(str(error), type(error).__name__, getattr(error, "status_code", None))
    finally:
        sys.path.remove(folder)


async def _infer(spec: Any, array: Any) -> dict[str, Any]:
    worker = BatchWorker()
    try:
        model = await worker.run(lambda: load_model(spec))
        response = await model.infer(InferRequest(spec.name, (Tensor.of("x", array),)), worker)
    finally:
        worker.close()
    return {output.name: output.array for output in response.outputs}


def a_classifier(folder: Path) -> tuple[Any, Path]:
    linear_model, joblib = import_module("sklearn.linear_model"), import_module("joblib")
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 4))
    model = linear_model.LogisticRegression().fit(x, (x[:, 0] > 0).astype(int) + (x[:, 1] > 0))
    joblib.dump(model, folder / "model.joblib")
    return model, folder / "model.joblib"


def a_sklearn_spec(weights: str, **changes: Any) -> Any:
    outputs = [{"name": "predict", "datatype": "INT64"}, {"name": "predict_proba", "datatype": "FP32", "shape": [3]}]
    return a_spec(**{"family": SKLEARN, "storageUri": weights, "outputs": outputs, "maxBatchSize": 64} | changes)


async def test_scikit_learn_model_answers_as_itself(ask: Ask, tmp_path: Path) -> None:
    model, file = a_classifier(tmp_path)
    rows = np.random.default_rng(1).normal(size=(40, 4)).astype(np.float32)
    for weights in (file, tmp_path):  # the file, or the folder that has it
        answers = await ask(a_sklearn_spec(str(weights)), rows)
        assert answers["predict"].tolist() == model.predict(rows).tolist()
        assert np.allclose(answers["predict_proba"], model.predict_proba(rows), atol=1e-6)
        assert answers["predict_proba"].dtype == np.float32


async def test_runtime_reads_weights_of_an_object_store(ask: Ask, tmp_path: Path, store: ObjectStore) -> None:
    model, file = a_classifier(tmp_path)
    address = store.put("models", "model.joblib", file.read_bytes())
    rows = np.ones((2, 4), np.float32)
    assert (await ask(a_sklearn_spec(address), rows))["predict"].tolist() == model.predict(rows).tolist()


async def test_own_runtime_reads_and_returns_texts(ask: Ask) -> None:
    texts = {"inputs": [{"name": "x", "datatype": "BYTES"}], "outputs": [{"name": "y", "datatype": "BYTES"}]}
    spec = a_spec(family="acme_runtimes.Upper", parameters={"suffix": "!"}, **texts)
    assert (await ask(spec, bytes_array([b"a", "é".encode()], (2,))))["y"].tolist() == [b"A!", "É!".encode()]
    for text, status, reason in ((b"bad", 400, "a text is bad"), (b"broken", 500, "no such thing")):
        with pytest.raises(Failure, match=reason) as refused:
            await ask(spec, bytes_array([text], (1,)))
        assert refused.value.status == status


async def test_runtime_reads_a_data_frame(ask: Ask) -> None:
    changes = {"inputs": [{"name": "x", "datatype": "FP32"}], "outputs": [{"name": "y", "datatype": "FP32"}]}
    spec = a_spec(family="acme_runtimes.Frame", parameters={"content_type": "pd"}, **changes)
    assert (await ask(spec, np.array([1.0, 2.0], np.float32)))["y"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"family": "acme_nowhere.Model"}, "no module 'acme_nowhere'; install it in trimtab's environment"),
        ({"family": "acme_runtimes.Lower"}, "acme_runtimes has no 'Lower'; it has: "),
        ({"family": "acme_runtimes.number"}, "'acme_runtimes.number' is no subclass of mlserver.MLModel"),
        ({"family": "acme_runtimes.Unready"}, r"'acme_runtimes.Unready': load\(\) of .* returned False"),
        ({"family": "acme_runtimes.Failing"}, "'acme_runtimes.Failing' cannot load .*: OSError: no disk"),
        ({"storageUri": "/nowhere/model.joblib"}, "/nowhere/model.joblib: no such weights"),
        ({"storageUri": "hf://acme/digits/model.joblib"}, "write hf://OWNER/NAME/FILE.safetensors"),
        ({"digest": f"sha256:{'0' * 64}"}, "the weights have digest sha256:.*, but sha256:0000"),
        ({"outputs": [{"name": "digit", "datatype": "INT64"}]}, r"only supports 'predict', .*\(digit was received\)$"),
        ({"outputs": [{"name": "predict", "datatype": "BYTES"}]}, "'predict' as INT64, but the stage declares BYTES"),
        (
            {"outputs": [{"name": "predict_proba", "datatype": "FP64", "shape": [2]}]},
            r"'predict_proba' with shape \[1, 3\] for 1 rows, but the stage declares \[2\]",
        ),
        (
            {"inputs": [{"name": "x", "datatype": "FP32", "shape": [5]}]},
            r"cannot run on the stage's inputs \(x \[1, 5\]\): ValueError: X has 5 features",
        ),
    ],
)
async def test_unusable_runtime_is_reported_by_name(
    ask: Ask, tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    file = a_classifier(tmp_path)[1]
    with pytest.raises(Failure, match=complaint) as refused:
        await ask(a_sklearn_spec(str(file), **changes), np.ones((1, 4), np.float32))
    assert refused.value.kind == "ModelError"
    assert "\n" not in str(refused.value)


def test_variant_names_an_implementation() -> None:
    pipeline = a_pipeline([a_stage(variants=[a_variant("linear", family="", implementation=SKLEARN)])])
    stage = pipeline.spec.stages[0]
    assert model_spec(pipeline, Path(), stage, stage.variant("linear"), 1.0).family == SKLEARN
    assert modules_to_preload(pipeline)[1:] == ["trimtab_model_servers.families.mlserver_runtime"]  # no torch
