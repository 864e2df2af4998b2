"""Requests that name a task are served by the engine's LoRA adapter for it."""

from typing import Any

import pytest

from tests.router.chats import a_chat, a_chat_pipeline, a_writer, events
from tests.router.engines import MODEL, Engine, a_served
from tests.router.fakes import a_rig
from tests.router.test_chats import CHAT, ask
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol import InferRequest, Tensor
from trimtab_protocol.chat.internal_wire import bytes_tensor
from trimtab_protocol.extensions import TASK

ADAPTERS = {"sql": "acme/sql-lora", "legal": "acme/legal-lora"}


def an_adapted_pipeline() -> InferencePipeline:
    return a_chat_pipeline([a_writer(variants=[a_served(adapters=ADAPTERS)])])


def an_engine(**changes: Any) -> Engine:
    return Engine(adapters=tuple(ADAPTERS.values()), **changes)


async def test_chat_runs_with_the_adapter_of_its_model():
    pipeline, engine = an_adapted_pipeline(), an_engine()
    async with a_rig(pipeline, {"text": [engine]}) as rig:
        for model in (f"{pipeline.name}:sql", pipeline.name):
            status, body, _ = await ask(rig, a_chat("one two", model=model))
            assert (status, body["model"]) == (200, model), body

    assert [asked["model"] for asked in engine.asked] == [ADAPTERS["sql"], MODEL]


async def test_tensors_run_with_the_adapter_of_their_task():
    pipeline, engine = an_adapted_pipeline(), an_engine()
    tensor = Tensor("messages", "BYTES", bytes_tensor([b'[{"role": "user", "content": "one two"}]']))
    async with a_rig(pipeline, {"text": [engine]}) as rig:
        status, body, _ = await rig.rest(InferRequest(pipeline.name, (tensor,), parameters={TASK: "sql"}))
        assert status == 200, body
        status, body, _ = await rig.rest(InferRequest(pipeline.name, (tensor,), parameters={TASK: "poems"}))

    assert (status, "known tasks: legal, sql" in body) == (400, True)
    assert [asked["model"] for asked in engine.asked] == [ADAPTERS["sql"]]


async def test_stream_names_the_adapted_model():
    pipeline, engine = an_adapted_pipeline(), an_engine()
    async with a_rig(pipeline, {"text": [engine]}) as rig:
        asked = a_chat("one two", stream=True, model=f"{pipeline.name}:legal")
        async with rig.session.post(rig.url + CHAT, json=asked) as answer:
            chunks = events(await answer.read())

    assert {chunk["model"] for chunk in chunks[:-1]} == {f"{pipeline.name}:legal"}
    assert engine.asked[0]["model"] == ADAPTERS["legal"]


async def test_route_runs_with_the_adapter_of_its_model():
    embedding = {"object": "list", "model": ADAPTERS["sql"], "data": [], "usage": {"prompt_tokens": 2}}
    pipeline, engine = an_adapted_pipeline(), an_engine(routes={"/v1/embeddings": embedding})
    model = f"{pipeline.name}:sql"
    async with (
        a_rig(pipeline, {"text": [engine]}) as rig,
        rig.session.post(f"{rig.url}/v1/embeddings", json={"model": model, "input": "a"}) as answer,
    ):
        assert (answer.status, (await answer.json())["model"]) == (200, model)

    assert engine.asked[0]["model"] == ADAPTERS["sql"]


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])
async def test_unknown_adapter_is_rejected_with_the_known_ones(path: str):
    pipeline, engine = an_adapted_pipeline(), an_engine(routes={"/v1/embeddings": {}})
    async with a_rig(pipeline, {"text": [engine]}) as rig:
        body = a_chat("one", model=f"{pipeline.name}:poems", input="a")
        async with rig.session.post(rig.url + path, json=body) as answer:
            status, message = answer.status, (await answer.json())["error"]["message"]

    assert (status, engine.asked) == (404, [])
    assert f"{pipeline.name}:poems" in message
    assert f"{pipeline.name}:legal" in message


async def test_models_are_the_pipeline_and_its_adapters():
    pipeline = an_adapted_pipeline()
    async with a_rig(pipeline, {"text": [an_engine()]}) as rig:
        async with rig.session.get(f"{rig.url}/v1/models") as answer:
            models = (await answer.json())["data"]
        async with rig.session.get(f"{rig.url}/v1/models/{pipeline.name}:sql") as answer:
            assert await answer.json() == models[-1]

    names = [pipeline.name, f"{pipeline.name}:legal", f"{pipeline.name}:sql"]
    assert [(model["id"], model.get("parent")) for model in models] == [
        (name, pipeline.name if name != pipeline.name else None) for name in names
    ]
