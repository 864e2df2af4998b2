"""Five pipelines of IPA: figures of the paper, and answers of miniature checkpoints over REST and gRPC."""

import io
import itertools
import json
import os
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from tritonclient import grpc, http

from tests.builders import a_plan
from tests.figures import Figures
from tests.ipa import ACCURACY_OF_THE_PLOTS, BESIDE_THE_TABLES, FOLDER, STAGE_SECONDS, VARIANTS, WEIGHTS, ipa_pipeline
from tests.local_run import Up, post, trimtab, up
from tests.model_servers.hf.rows import Rows, samples, some_images, some_sounds, some_texts
from trimtab_pipelines.documents import load_pipeline, write_json
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.processes.parent_death import command_tied_to_parent
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol.tensors import bytes_array

NAMES = sorted(STAGE_SECONDS)


@pytest.mark.parametrize("name", NAMES)
def test_slo_and_objective_match_the_paper(name):
    spec = ipa_pipeline(name).spec
    alpha, beta = WEIGHTS[name]

    assert spec.slo.latency_seconds == pytest.approx(sum(STAGE_SECONDS[name]), abs=0.011)  # the paper rounds the sum
    assert len(spec.ordered_stages) == len(STAGE_SECONDS[name])
    objective = spec.objective
    assert (objective.goal, objective.accuracy_metric) == ("Weighted", "Product")
    assert (objective.accuracy_weight, objective.cost_weight, objective.batch_weight) == (alpha, beta, 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_variants_match_the_paper(name):
    for stage in ipa_pipeline(name).spec.stages:
        assert stage.batch_sizes == (1, 2, 4, 8, 16, 32, 64)
        for variant in stage.variants:
            row = (VARIANTS | BESIDE_THE_TABLES)[variant.name]
            accuracy = ACCURACY_OF_THE_PLOTS.get(variant.name, row.accuracy)
            assert variant.resources.cpu == row.cores
            assert 100 * variant.accuracy == pytest.approx(accuracy, abs=0.006)
            assert variant.accuracy_evidence.source == "Published"


def test_every_variant_of_the_paper_exists():
    found = {v.name for name in NAMES for stage in ipa_pipeline(name).spec.stages for v in stage.variants}

    assert found == VARIANTS.keys() | BESIDE_THE_TABLES.keys()


def test_video_keeps_the_papers_slo_and_classifiers():
    ours, paper = load_pipeline(FOLDER / "video").spec, ipa_pipeline("video").spec

    assert (ours.slo, ours.objective, ours.adaptation) == (paper.slo, paper.objective, paper.adaptation)
    assert [v.name for v in ours.stages[1].variants] == [v.name for v in paper.stages[1].variants]
    assert [v.accuracy for v in ours.stages[1].variants] == [v.accuracy for v in paper.stages[1].variants]


SERVED = {
    "video": ("rtdetr-r18", "resnet18"),
    "audio-qa": ("s2t-small", "roberta-base"),
    "audio-sent": ("wav2vec2-base", "distilbert"),
    "sum-qa": ("distilbart-1-1", "xlm-roberta-base"),
    "nlp": ("xlm-roberta-base-langid", "opus-mt-fr-en", "distilbart-1-1"),
}
"""One variant of each stage, which together are of every architecture; the load uses a second one too."""
ROWS = 3
LOAD_RPS, CHANGE_SECONDS = 3, 2.0
LOAD_SECONDS = float(os.environ.get("IPA_LOAD_SECONDS", "12"))
"""Of each pipeline; 180 for the whole run."""


class Chain:
    """The models of a pipeline, called one row at a time by transformers itself."""

    def __init__(self, folder: Path) -> None:
        self._hf: Any = import_module("transformers")
        self._folders = {stage: folder / f"{stage}-{variant}" for stage, variant in STAGES[folder.name].items()}

    def pipeline(self, task: str, stage: str, value: Any, **options: Any) -> Any:
        return self._hf.pipeline(task, model=str(self._folders[stage]), device=-1)(value, **options)

    def generate(self, stage: str, text: str) -> str:
        tokenizer, model = self._models(stage, "AutoModelForSeq2SeqLM")
        encoded = tokenizer([text], return_tensors="pt", truncation=True)
        return str(tokenizer.batch_decode(model.generate(**encoded, do_sample=False), skip_special_tokens=True)[0])

    def answer(self, question: str, context: str) -> str:
        """The span with the highest product of probabilities, of at most 15 tokens."""
        tokenizer, model = self._models("answer", "AutoModelForQuestionAnswering")
        encoded = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
        offsets = encoded.pop("offset_mapping")[0].tolist()
        inside = [index for index, part in enumerate(encoded.sequence_ids(0)) if part == 1]
        output = model(**encoded)
        start, end = output.start_logits[0].tolist(), output.end_logits[0].tolist()
        spans = [(first, last) for first in inside for last in inside if first <= last < first + 15]
        first, last = max(spans, key=lambda span: start[span[0]] + end[span[1]])
        return context[offsets[first][0] : offsets[last][1]]

    def _models(self, stage: str, auto_class: str) -> tuple[Any, Any]:
        folder = self._folders[stage]
        return self._hf.AutoTokenizer.from_pretrained(folder), getattr(self._hf, auto_class).from_pretrained(folder)

    def video(self, image: bytes) -> dict[str, object]:
        picture = Image.open(io.BytesIO(image)).convert("RGB")
        found = max(self.pipeline("object-detection", "detect", picture, threshold=0.0), key=lambda item: item["score"])
        return {"object": found["label"], "confidence": found["score"]}

    def audio_qa(self, audio: bytes, question: bytes) -> dict[str, object]:
        transcript = self._hear(audio)
        return {"transcript": transcript, "answer": self.answer(question.decode(), transcript)}

    def audio_sent(self, audio: bytes) -> dict[str, object]:
        transcript = self._hear(audio)
        found = self.pipeline("text-classification", "sentiment", transcript)[0]
        return {"transcript": transcript, "label": found["label"], "score": found["score"]}

    def sum_qa(self, document: bytes, question: bytes) -> dict[str, object]:
        summary = self.generate("summarise", document.decode())
        return {"summary": summary, "answer": self.answer(question.decode(), summary)}

    def nlp(self, text: bytes) -> dict[str, object]:
        translation = self.generate("translate", text.decode())
        language = self.pipeline("text-classification", "identify", text.decode())[0]["label"]
        summary = self.generate("summarise", translation)
        return {"language": language, "translation": translation, "summary": summary}

    def _hear(self, audio: bytes) -> str:
        (sound,) = samples([audio])
        return str(self.pipeline("automatic-speech-recognition", "transcribe", sound)["text"])


STAGES = {
    name: dict(zip((stage.name for stage in ipa_pipeline(name).spec.ordered_stages), variants, strict=True))
    for name, variants in SERVED.items()
}


def write_miniatures(name: str, folder: Path) -> None:
    """Miniatures of a pipeline, with at most two variants of each stage; every picture shows an object."""
    written = trimtab("checkpoints", "tiny", str(FOLDER / name), "-o", str(folder))
    assert written.code == 0, written.errors
    document = yaml.safe_load((folder / "pipeline.yaml").read_text())
    for stage in document["spec"]["stages"]:
        stage["variants"].sort(key=lambda variant: variant["name"] != STAGES[name][stage["name"]])
        del stage["variants"][2:]
        if stage["name"] == "detect":
            for variant in stage["variants"]:
                variant["parameters"]["threshold"] = 0.0
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(document))


def call_by_every_protocol(serving: Up, name: str, rows: dict[str, Rows]) -> list[dict[str, list[Any]]]:
    """Answers by output: over REST and gRPC in binary, and of texts also in plain JSON."""
    answers = []
    for protocol, port in ((http, serving.rest_port), (grpc, serving.grpc_port)):
        client: Any = protocol.InferenceServerClient(f"127.0.0.1:{port}")
        inputs: list[Any] = []
        for tensor, values in rows.items():
            inputs.append(protocol.InferInput(tensor, [ROWS], "BYTES"))
            inputs[-1].set_data_from_numpy(bytes_array(values, (ROWS,)))
        answer = client.infer(name, inputs, timeout=60_000_000)
        outputs = load_pipeline(serving.folder.parent / name).spec.outputs
        answers.append({output.name: answer.as_numpy(output.name).tolist() for output in outputs})
        for values in answers[-1].values():
            values[:] = [value.decode() if isinstance(value, bytes) else value for value in values]
    if not rows.keys() & {"image", "audio"}:
        plain = [
            {"name": tensor, "datatype": "BYTES", "shape": [ROWS], "data": [value.decode() for value in values]}
            for tensor, values in rows.items()
        ]
        status, body = post(f"http://127.0.0.1:{serving.rest_port}/v2/models/{name}/infer", {"inputs": plain})
        assert status == 200, body
        answers.append({output["name"]: output["data"] for output in body["outputs"]})
    return answers


def send_load_while_variants_change(serving: Up, folder: Path, plan: PipelinePlan) -> dict[str, Any]:
    """Figures of a load during which every stage changes its variant every few seconds."""
    pipeline = load_pipeline(folder)
    command = command_tied_to_parent("trimtab", "loadtest", str(folder), "--load", f"constant:{LOAD_RPS}")
    command += ["--duration", f"{LOAD_SECONDS:g}", "--address", f"127.0.0.1:{serving.rest_port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sending:
        for number in itertools.count(1):
            try:
                output, _ = sending.communicate(timeout=CHANGE_SECONDS)
                break
            except subprocess.TimeoutExpired:
                write_json(serving.folder / "plan.json", with_variants(pipeline, plan, number))
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])["figures"]
    return figures | {"changes": number - 1}


def with_variants(pipeline: InferencePipeline, plan: PipelinePlan, number: int) -> PipelinePlan:
    stages = tuple(
        planned.replace(variant=stage.variants[number % len(stage.variants)].name)
        for stage, planned in zip(pipeline.spec.stages, plan.spec.stages, strict=True)
    )
    return plan.with_spec(stages=stages, generation=plan.spec.generation + number)


@pytest.mark.conformance
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SERVED)
def test_pipeline_answers_as_transformers_chained(tmp_path: Path, name: str, figures: Figures) -> None:
    folder = tmp_path / name
    write_miniatures(name, folder)
    media = {"image": some_images, "audio": some_sounds}
    pipeline = load_pipeline(folder)
    rows = {
        tensor.name: media.get(tensor.name, some_texts)(ROWS, seed=len(tensor.name)) for tensor in pipeline.spec.inputs
    }
    if "question" in rows:
        rows["question"] = [row[:24].decode(errors="ignore").encode() for row in rows["question"]]
    call = getattr(Chain(folder), name.replace("-", "_"))
    expected = [call(**{tensor: values[row] for tensor, values in rows.items()}) for row in range(ROWS)]
    plan = a_plan(pipeline)
    write_json(tmp_path / "plan.json", plan)

    with up(tmp_path, "--plan", str(tmp_path / "plan.json"), pipeline=folder) as serving:
        answers = call_by_every_protocol(serving, name, rows)
        load = send_load_while_variants_change(serving, folder, plan)

    for answer in answers:
        for tensor, first in expected[0].items():
            wanted = [row[tensor] for row in expected]
            assert answer[tensor] == (wanted if isinstance(first, str) else pytest.approx(wanted, abs=1e-4))
        assert all(len(values) == ROWS for values in answer.values())
    figures.add(**{key: load[key] for key in ("received", "failed", "ok", "late", "dropped", "changes")})
    assert (load["failed"], load["ok"]) == (0, load["received"])
    assert load["received"] > LOAD_SECONDS
