"""Checkpoints served by `trimtab up`: the page's example and calls, and audio files through two stages."""

import json
import re
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http
import yaml
from tritonclient.utils import InferenceServerException

from tests.builders import a_plan
from tests.local_run import post, trimtab, up
from tests.model_servers.chat.test_text_generation import generate
from tests.model_servers.hf import checkpoints
from tests.model_servers.hf.rows import samples, some_images, some_sounds, some_texts
from tests.tiny_llama import write_model
from trimtab_model_servers.families.hf import miniatures
from trimtab_pipelines.documents import load_pipeline, write_json
from trimtab_pipelines.families import HF_FAMILIES
from trimtab_protocol.tensors import bytes_array

pytestmark = pytest.mark.timeout(300)
transformers: Any = import_module("transformers")
PAGE = Path(__file__).parents[2] / "docs" / "develop" / "hugging-face.md"
YAML_BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPEECH = """
apiVersion: trimtab.dev/v1alpha1
kind: InferencePipeline
metadata: {name: calls}
spec:
  inputs: [{name: audio, datatype: BYTES}]
  outputs: [{name: text, from: transcribe.outputs.text}, {name: label, from: classify.outputs.label}]
  slo: {latency: 5s}
  budget: {cores: "1"}
  stages:
  - name: transcribe
    inputs: [{name: audio, from: request.inputs.audio}]
    outputs: [{name: text, datatype: BYTES}]
    batchSizes: [1, 4]
    variants:
    - {name: ctc, family: hf/speech-recognition, storageUri: speech, accuracy: 0.9, resources: {cpu: 500m}}
  - name: classify
    inputs: [{name: text, from: transcribe.outputs.text}]
    outputs: [{name: label, datatype: BYTES}]
    batchSizes: [1, 4]
    variants:
    - name: roberta
      family: hf/text-classification
      storageUri: classifier
      parameters: {truncate: true}
      accuracy: 0.9
      resources: {cpu: 500m}
"""


def classifier(folder: Path) -> Path:
    return miniatures.encoder("Roberta", folder, "text-classification")


def test_page_serves_its_example(tmp_path: Path) -> None:
    example = YAML_BLOCK.findall(PAGE.read_text())[0]
    (tmp_path / "pipeline.yaml").write_text(example)
    for name in ("small", "large"):
        classifier(tmp_path / name)
    texts = [text.decode() for text in some_texts(20)]
    answers = transformers.pipeline("text-classification", model=str(tmp_path / "large"), device=-1)(texts)
    lines = ({"inputs": {"text": t}, "outputs": {"label": a["label"]}} for t, a in zip(texts, answers, strict=True))
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    evaluated = trimtab("evaluate", str(tmp_path), "--samples", str(tmp_path / "samples.jsonl"))
    variants = yaml.safe_load((tmp_path / "pipeline.yaml").read_text())["spec"]["stages"][0]["variants"]
    with up(tmp_path, pipeline=tmp_path) as serving:
        url = f"http://127.0.0.1:{serving.rest_port}/v2/models/sentiment/infer"
        body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [20], "data": texts}]}
        status, response = post(url, body)
        body["inputs"][0] |= {"shape": [1], "data": ["word " * 1000]}
        refused, reason = post(url, body)

    assert evaluated.code == 0, evaluated.errors
    assert [variant["accuracy"] for variant in variants] == [1, 1]  # the same checkpoint
    assert status == 200, response
    assert response["outputs"][0]["data"] == [answer["label"] for answer in answers]
    assert response["outputs"][1]["data"] == pytest.approx([answer["score"] for answer in answers], abs=1e-4)
    assert (refused, "tokens; send at most 512" in reason["error"]) == (400, True), reason


def test_page_serves_its_chat_example(tmp_path: Path) -> None:
    example = next(block for block in YAML_BLOCK.findall(PAGE.read_text()) if "name: chat" in block)
    (tmp_path / "pipeline.yaml").write_text(example)
    write_model(tmp_path / "model", dtype="float32", initializer_range=0.2)
    chat: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "What is a stage?"}]}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

    with up(tmp_path, pipeline=tmp_path) as serving:
        url = f"http://127.0.0.1:{serving.rest_port}/v1/chat/completions"
        status, response = post(url, chat | {"max_tokens": 16, "min_tokens": 16})
        refused, reason = post(url, chat | {"messages": [{"role": "user", "content": [picture]}]})
        plan = json.loads((serving.folder / "plan.json").read_bytes())

    expected = generate(tmp_path / "model", "What is a stage?", 16)
    assert status == 200, response
    assert response["choices"][0]["message"]["content"].rstrip("\ufffd") == expected.rstrip("\ufffd")
    assert refused == 400, reason
    assert plan["spec"]["stages"][0]["prefillSeconds"]  # chats without images were measured to their first token


@pytest.mark.conformance
def test_audio_files_pass_two_stages(tmp_path: Path) -> None:
    (tmp_path / "pipeline.yaml").write_text(SPEECH)
    miniatures.wav2vec2(tmp_path / "speech")
    classifier(tmp_path / "classifier")
    files = some_sounds(6)
    hear = transformers.pipeline("automatic-speech-recognition", model=str(tmp_path / "speech"), device=-1)
    classify = transformers.pipeline("text-classification", model=str(tmp_path / "classifier"), device=-1)
    texts = [hear(file)["text"] for file in samples(files)]
    labels = [classify(text, truncation=True)[0]["label"] for text in texts]

    with up(tmp_path, pipeline=tmp_path) as serving:
        client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{serving.rest_port}")
        answer = client.infer("calls", [audio_input(files)])
        with pytest.raises(InferenceServerException, match="stage transcribe: input 'audio': row 0 is no audio file"):
            client.infer("calls", [audio_input([b"no audio"])])

    assert answer.as_numpy("text").tolist() == [text.encode() for text in texts]
    assert answer.as_numpy("label").tolist() == [label.encode() for label in labels]


def write_all_tasks(folder: Path) -> None:
    """A pipeline `tasks` with a stage of a miniature for each task, which runs if the request has its inputs."""
    stages, outputs = list[dict[str, Any]](), list[dict[str, str]]()
    inputs: dict[str, dict[str, Any]] = {}
    for family, declared in HF_FAMILIES.items():
        task = family.removeprefix("hf/")
        if task in {"zero-shot-image-classification", "image-embedding"}:
            checkpoints.clip(folder / task)
        else:
            assert miniatures.write_miniature(family, "roberta", folder / task)
        required = [tensor.name for tensor in declared.inputs if tensor.name not in declared.optional]
        inputs |= {name: {"name": name, "datatype": "BYTES", "optional": True} for name in required}
        outputs.append({"name": task, "from": f"{task}.outputs.{declared.outputs[0].name}"})
        variant: dict[str, Any] = {"name": "tiny", "family": family, "storageUri": task, "accuracy": 0.9}
        variant["resources"] = {"cpu": "100m"}
        if task.startswith("zero-shot"):
            variant["parameters"] = {"labels": "cat, sky"}
        stages.append({"name": task, "batchSizes": [1], "variants": [variant]})
    spec = {"slo": {"latency": "20s"}, "budget": {"cores": "11"}, "stages": stages}
    spec |= {"inputs": list(inputs.values()), "outputs": outputs}
    document = {"apiVersion": "trimtab.dev/v1alpha1", "kind": "InferencePipeline", "metadata": {"name": "tasks"}}
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(document | {"spec": spec}))


@pytest.mark.conformance
def test_page_calls_each_task_by_curl(tmp_path: Path) -> None:
    write_all_tasks(tmp_path)
    (tmp_path / "call.wav").write_bytes(some_sounds(1)[0])
    (tmp_path / "photo.jpg").write_bytes(some_images(2)[1])
    commands = re.findall(r"^```sh\n(call\(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]
    tasks = re.findall(r"^(?:call|send) (\S+)", commands, re.MULTILINE)

    write_json(tmp_path / "plan.json", a_plan(load_pipeline(tmp_path)))

    with up(tmp_path, "--plan", str(tmp_path / "plan.json"), pipeline=tmp_path) as serving:
        script = commands.replace("localhost:8080/v2/models/$1/", f"127.0.0.1:{serving.rest_port}/v2/models/tasks/")
        printed = subprocess.run(["sh", "-e", "-c", script], cwd=tmp_path, capture_output=True, check=True, text=True)

    answers = [json.loads(answer) for answer in printed.stdout.replace("}{", "}\n{").splitlines()]
    assert {f"hf/{task}" for task in tasks} == HF_FAMILIES.keys()
    for task, answer in zip(tasks, answers, strict=True):
        assert task in {output["name"] for output in answer["outputs"]}, answer


def audio_input(files: list[bytes]) -> Any:
    tensor = tritonclient.http.InferInput("audio", [len(files)], "BYTES")
    tensor.set_data_from_numpy(bytes_array(files, (len(files),)))
    return tensor
