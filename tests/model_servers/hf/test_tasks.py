"""Tasks of checkpoints: the answers of transformers' own pipelines, alone and in batches of mixed rows."""

import io
import struct
import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from tokenizers import processors
from torch._dynamo.utils import counters

from tests.model_servers.hf import checkpoints
from tests.model_servers.hf.rows import RATE_HZ, Rows, samples, some_images, some_sounds, some_texts
from trimtab_model_servers.errors import InvalidRow, ModelError
from trimtab_model_servers.families.hf import miniatures
from trimtab_model_servers.families.hf.audio_files import decode_audio
from trimtab_model_servers.families.hf.checkpoint import DTYPES
from trimtab_model_servers.families.hf.speech import text_probabilities
from trimtab_model_servers.int8 import Int8Linear
from trimtab_model_servers.server.hosted_model import HostedModel, load_model
from trimtab_model_servers.transformer.compiled import compiler_problem
from trimtab_pipelines.families import HF_FAMILIES, Medium
from trimtab_pipelines.model_spec import InputSpec, ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_protocol import Tensor
from trimtab_protocol.tensors import DATATYPES, bytes_array

transformers: Any = import_module("transformers")
ROWS = 200
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by name, written once."""
    root, made = tmp_path_factory.mktemp("checkpoints"), dict[str, Path]()
    makers: dict[str, Callable[[Path], Path]] = {
        "generated speech": checkpoints.moonshine,
        "padded speech": checkpoints.whisper,
        "spectral speech": checkpoints.parakeet,
        "unmasked speech": lambda path: miniatures.wav2vec2(path, masked=False),
        "timm": miniatures.timm_resnet,
        "zero-shot-image-classification": checkpoints.clip,
        "image-embedding": checkpoints.clip,
    }

    def get(task: str) -> Path:
        if task not in made:
            torch.manual_seed(0)  # of biases, which miniatures leave as their classes draw them
            made[task] = root / task
            if task in makers:
                makers[task](made[task])
            else:
                assert miniatures.write_miniature(f"hf/{task}", "roberta", made[task]), f"no miniature for {task}"
        return made[task]

    return get


def a_model(task: str, folder: Path, **parameters: Any) -> HostedModel:
    return load_model(a_spec(task, folder, **parameters))


def a_spec(task: str, folder: Path, **parameters: Any) -> ModelSpec:
    declared = HF_FAMILIES[f"hf/{task}"]
    return ModelSpec(
        name="tiny",
        family=f"hf/{task}",
        storage_uri=str(folder),
        parameters=parameters,
        operating_points=(OperatingPoint(name="full", accuracy=0.9),),
        accuracy=0.9,
        inputs=tuple(
            InputSpec(name=tensor.name, datatype=tensor.datatype, optional=tensor.name in declared.optional)
            for tensor in declared.inputs
        ),
        outputs=declared.outputs,
    )


def infer(model: HostedModel, **inputs: Rows | np.ndarray) -> dict[str, Any]:
    arrays = {
        name: bytes_array(rows, (len(rows),)) if isinstance(rows, list) else rows for name, rows in inputs.items()
    }
    tensors = tuple(Tensor(name, DATATYPES[array.dtype], array) for name, array in arrays.items())
    names = [output.name for output in model.spec.outputs]
    outputs, _ = model.compute(tensors, model.spec.operating_points[0], names)
    return {output.name: output.array for output in outputs}


def pictures(files: Rows) -> list[Image.Image]:
    return [Image.open(io.BytesIO(file)).convert("RGB") for file in files]


def test_texts_are_classified_as_by_the_pipeline(folder):
    path, texts = folder("text-classification"), some_texts(40)
    expected = transformers.pipeline("text-classification", model=str(path), device=-1)(
        [text.decode() for text in texts]
    )
    answers = infer(a_model("text-classification", path), text=texts)
    assert answers["label"].tolist() == [answer["label"].encode() for answer in expected]
    assert answers["score"] == pytest.approx([answer["score"] for answer in expected], abs=TOLERANCE)
    assert len(set(answers["label"].tolist())) > 1


def test_entities_are_those_of_the_pipeline(folder):
    path, texts = folder("token-classification"), some_texts(20)
    pipeline = transformers.pipeline("token-classification", model=str(path), device=-1, aggregation_strategy="simple")
    expected = [pipeline(text.decode()) for text in texts]
    answers = infer(a_model("token-classification", path), text=texts)
    entities = [entity for row in expected for entity in row]
    assert answers["entities"].tolist() == [len(row) for row in expected]
    assert answers["label"].tolist() == [entity["entity_group"].encode() for entity in entities]
    assert answers["word"].tolist() == [entity["word"].encode() for entity in entities]
    assert answers["start"].tolist() == [entity["start"] for entity in entities]
    assert answers["score"] == pytest.approx([float(entity["score"]) for entity in entities], abs=TOLERANCE)


@pytest.mark.parametrize("checkpoint", ["image-classification", "timm"])
def test_images_are_classified_as_by_the_pipeline(folder, checkpoint):
    path, files = folder(checkpoint), some_images(20)
    pipeline = transformers.pipeline("image-classification", model=str(path), device=-1)
    expected = [rows[0] for rows in pipeline(pictures(files), top_k=1)]
    answers = infer(a_model("image-classification", path), image=files)
    assert answers["label"].tolist() == [answer["label"].encode() for answer in expected]
    assert answers["score"] == pytest.approx([answer["score"] for answer in expected], abs=TOLERANCE)


def test_objects_are_those_of_the_pipeline(folder):
    path, files = folder("object-detection"), some_images(8)
    pipeline = transformers.pipeline("object-detection", model=str(path), device=-1)
    scores = sorted(item["score"] for item in pipeline(pictures(files)[0], threshold=0.0))
    threshold = (scores[len(scores) // 2] + scores[len(scores) // 2 - 1]) / 2
    expected = [pipeline(picture, threshold=threshold) for picture in pictures(files)]
    answers = infer(a_model("object-detection", path, threshold=threshold), image=files)
    assert answers["objects"].tolist() == [len(row) for row in expected]
    objects = [item for row in expected for item in row]
    assert objects
    assert answers["label"].tolist() == [item["label"].encode() for item in objects]
    assert answers["score"] == pytest.approx([item["score"] for item in objects], abs=TOLERANCE)
    boxes = [[item["box"][side] for side in ("xmin", "ymin", "xmax", "ymax")] for item in objects]
    assert np.abs(answers["box"] - np.array(boxes)).max() <= 1  # the pipeline's boxes are integers
    most = infer(a_model("object-detection", path, threshold=threshold, max_objects=1), image=files)
    assert most["objects"].max() == 1
    assert set(most["score"].tolist()) <= set(answers["score"].tolist())
    sizes = np.repeat([picture.size for picture in pictures(files)], answers["objects"], axis=0)
    inside = [answers["box"][:, sides].clip(0, sizes) for sides in (slice(2), slice(2, 4))]
    cut = np.array([Image.open(io.BytesIO(file)).size for file in answers["crop"]])
    assert np.abs(cut - (inside[1] - inside[0])).max() <= 2


def test_images_get_the_pipelines_given_label(folder):
    path, files, labels = folder("zero-shot-image-classification"), some_images(8), ["cat", "a red car", "sky"]
    pipeline = transformers.pipeline("zero-shot-image-classification", model=str(path), device=-1)
    expected = [rows[0] for rows in pipeline(pictures(files), candidate_labels=labels)]
    answers = infer(a_model("zero-shot-image-classification", path, labels=", ".join(labels)), image=files)
    assert answers["label"].tolist() == [answer["label"].encode() for answer in expected]
    assert answers["score"] == pytest.approx([answer["score"] for answer in expected], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("checkpoint", "distinct"),
    [("speech-recognition", 20), ("unmasked speech", 20), ("generated speech", 20), ("padded speech", 4)],
)
def test_speech_is_recognized_as_by_the_pipeline(folder, checkpoint, distinct):
    path, files = folder(checkpoint), some_sounds(40)
    spec = a_spec("speech-recognition", path)
    pipeline = transformers.pipeline("automatic-speech-recognition", model=str(path), device=-1)
    expected = [pipeline(samples)["text"].encode() for samples in samples(files)]
    answers = infer(load_model(spec.model_copy(update={"outputs": spec.outputs[:1]})), audio=files)
    assert answers["text"].tolist() == expected
    assert len(set(expected)) > distinct


def test_speech_in_spectra_is_recognized_as_by_generate(folder):
    path, files = folder("spectral speech"), some_sounds(40)
    processor, model = (
        transformers.AutoProcessor.from_pretrained(path),
        transformers.AutoModelForCTC.from_pretrained(path),
    )
    features = processor([*samples(files)], sampling_rate=RATE_HZ, return_tensors="pt")
    expected = processor.batch_decode(model.eval().generate(**features))
    answers = infer(a_model("speech-recognition", path), audio=files)
    assert answers["text"].tolist() == [text.encode() for text in expected]
    assert len(set(expected)) > 20


def test_score_is_the_probability_of_the_text():
    probabilities = torch.tensor([[0.6, 0.4], [0.3, 0.7]])  # blank and a token: only two blanks are another text
    scores = text_probabilities(probabilities.log()[None], torch.tensor([2]), 0)
    assert scores.tolist() == pytest.approx([1 - 0.6 * 0.3])


def test_generated_speech_has_no_score(folder):
    with pytest.raises(ModelError, match="only CTC models have an output 'score'"):
        a_model("speech-recognition", folder("generated speech"))


@pytest.mark.parametrize(
    ("task", "parameters"), [("speech-recognition", {"max_seconds": 0.3}), ("text-classification", {"max_tokens": 8})]
)
def test_model_with_a_tight_limit_warms_up(folder, task, parameters):
    (limit,) = parameters.values()
    network: Any = a_model(task, folder(task), **parameters).network
    assert network.limit("audio") == limit


def test_audio_of_other_formats_and_rates_is_read():
    seconds = np.arange(RATE_HZ) / RATE_HZ
    expected = 0.3 * np.sin(2 * np.pi * 440 * seconds)
    for form, rate_hz, tolerance in (("WAV", RATE_HZ, 1e-4), ("FLAC", 2 * RATE_HZ, 1e-2), ("OGG", RATE_HZ, 0.1)):
        file = io.BytesIO()
        tone = 0.3 * np.sin(2 * np.pi * 440 * np.arange(rate_hz) / rate_hz)
        soundfile.write(file, np.stack([tone, tone], axis=1), rate_hz, format=form)
        (samples,) = decode_audio("audio", bytes_array([file.getvalue()], (1,)), RATE_HZ, max_seconds=2)
        assert samples.shape == expected.shape
        assert np.abs(samples - expected)[100:-100].max() <= tolerance, form


def an_array_model(task: str, folder: Path, **arrays: tuple[str, tuple[int, ...]]) -> HostedModel:
    spec = a_spec(task, folder)
    read = [InputSpec(name=name, datatype=datatype, shape=shape) for name, (datatype, shape) in arrays.items()]
    return load_model(spec.model_copy(update={"inputs": tuple(read)}))


def test_pixels_are_answered_as_their_files(folder):
    pixels = np.random.default_rng(0).integers(256, size=(3, 40, 56, 3), dtype=np.uint8)
    files = []
    for picture in pixels:
        files.append(io.BytesIO())
        Image.fromarray(picture).save(files[-1], "PNG")
    path = folder("image-classification")
    model = an_array_model("image-classification", path, image=("UINT8", (-1, -1, 3)))

    answers = infer(model, image=pixels)
    expected = infer(a_model("image-classification", path), image=[file.getvalue() for file in files])
    with pytest.raises(InvalidRow, match="56 x 0 pixels"):
        infer(model, image=pixels[:, :0])

    assert answers["label"].tolist() == expected["label"].tolist()
    np.testing.assert_array_equal(answers["score"], expected["score"])


def test_samples_are_answered_as_their_files(folder):
    sound = np.random.default_rng(0).normal(0, 0.1, (2, 4_000)).astype(np.float32)
    rates_hz = (8_000, 16_000)
    files = [io.BytesIO() for _ in sound]
    for file, samples_, rate_hz in zip(files, sound, rates_hz, strict=True):
        soundfile.write(file, samples_, rate_hz, format="WAV", subtype="FLOAT")
    path = folder("speech-recognition")
    model = an_array_model("speech-recognition", path, audio=("FP32", (-1,)), rate=("INT32", ()))

    answers = infer(model, audio=sound, rate=np.array(rates_hz, np.int32))
    expected = infer(a_model("speech-recognition", path), audio=[file.getvalue() for file in files])

    assert answers["text"].tolist() == expected["text"].tolist()
    for wrong, problem in ((sound[:, :100], r"0.0125 s of audio; send 0.025"), (np.nan * sound, "not finite")):
        with pytest.raises(InvalidRow, match=problem):
            infer(model, audio=wrong, rate=np.array(rates_hz, np.int32))


def wav_of(seconds: float, rate_hz: int = RATE_HZ) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(int(seconds * rate_hz), np.float32), rate_hz, format="WAV")
    return file.getvalue()


TASKS = [name.removeprefix("hf/") for name in HF_FAMILIES]
PARAMETERS: dict[str, dict[str, Any]] = {
    "zero-shot-image-classification": {"labels": "cat, a red car, sky", "template": "{}"},
    "object-detection": {"threshold": 0.0},
    "question-answering": {"window": 64, "overlap": 16},
}


def mixed_rows(task: str, count: int) -> dict[str, Rows]:
    """Rows of different lengths and sizes for each input of a task."""
    declared = HF_FAMILIES[f"hf/{task}"]
    draw = {"text": some_texts, "image": some_images, "audio": some_sounds}[declared.medium]
    rows = {tensor.name: draw(count, seed=len(tensor.name)) for tensor in declared.inputs}
    if "question" in rows:
        rows["question"] = [b" ".join(row.split()[:4]) for row in rows["question"]]
    return {name: values for name, values in rows.items() if name not in declared.optional}


def in_order_of(expected: dict[str, Any], answers: dict[str, Any]) -> dict[str, Any]:
    """Detected objects in the expected order: those of nearly equal scores are in any order."""
    found, wanted = (np.column_stack([each["box"], each["score"]]) for each in (answers, expected))
    order, start = list[int](), 0
    for objects in expected["objects"].tolist():
        rest = list(range(start, start + objects))
        for row in wanted[start : start + objects]:
            order.append(rest.pop(int(np.abs(found[rest] - row).max(axis=1).argmin())))
        start += objects
    return {name: values if name == "objects" else values[order] for name, values in answers.items()}


@pytest.mark.parametrize(
    ("task", "checkpoint"),
    [(task, "") for task in TASKS] + [("speech-recognition", "spectral speech")],
)
def test_rows_of_a_batch_are_answered_as_alone(folder, task, checkpoint):
    model, rows = a_model(task, folder(checkpoint or task), **PARAMETERS.get(task, {})), mixed_rows(task, ROWS)
    together = infer(model, **rows)
    alone = [infer(model, **{name: [values[row]] for name, values in rows.items()}) for row in range(ROWS)]
    expected = {name: np.concatenate([answer[name] for answer in alone]) for name in together}
    if "objects" in expected:
        assert together["objects"].tolist() == expected["objects"].tolist()
        together = in_order_of(expected, together)
    for name, answers in together.items():
        if answers.dtype.kind in "Oi":
            assert answers.tolist() == expected[name].tolist()
        else:
            np.testing.assert_allclose(answers, expected[name], rtol=TOLERANCE, atol=TOLERANCE)
    assert any(len({str(answer) for answer in answers}) > 1 for answers in together.values())


@pytest.mark.slow
@pytest.mark.skipif(bool(compiler_problem()), reason=compiler_problem())
@pytest.mark.parametrize("task", ["question-answering", "image-classification"])
def test_compiled_model_answers_as_the_eager_one(folder, task):
    parameters, rows = PARAMETERS.get(task, {}), mixed_rows(task, 20)
    plain, compiled = (a_model(task, folder(task), **parameters, compile=kind) for kind in ("none", "torch.compile"))
    graphs = counters["stats"]["unique_graphs"]

    for count in (1, 2, 3, 20):
        some = {name: values[:count] for name, values in rows.items()}
        answers, expected = infer(compiled, **some), infer(plain, **some)
        for name, values in expected.items():
            if values.dtype.kind in "Oi":
                assert answers[name].tolist() == values.tolist()
            else:
                np.testing.assert_allclose(answers[name], values, rtol=TOLERANCE, atol=TOLERANCE)
    assert graphs == counters["stats"]["unique_graphs"] > 0  # nothing was compiled after loading


def test_compiling_is_refused_by_name_if_it_cannot_be(folder, monkeypatch):
    with pytest.raises(ModelError, match=r"parameters.compile: Input should be 'none' or 'torch.compile'"):
        a_model("text-classification", folder("text-classification"), compile="AOTInductor")
    with pytest.raises(ModelError, match=r"parameters.compile torch.compile: models of this task are not compiled"):
        a_model("summarization", folder("summarization"), compile="torch.compile")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ModelError, match=r"parameters.compile torch.compile: no C\+\+ compiler"):
        a_model("text-classification", folder("text-classification"), compile="torch.compile")


def test_texts_of_other_languages_are_not_translated(folder):
    model = a_model("translation", folder("translation"), language="fr")
    translated = model.network.infer({"text": np.array([b"one word", b"two"], object)}, model.spec.operating_points[0])
    inputs = {"text": np.array([b"one word", b"two"], object), "language": np.array([b"en", b"fr"], object)}
    answers = model.network.infer(inputs, model.spec.operating_points[0])["text"]
    assert answers.tolist() == [b"one word", translated["text"][1]] != translated["text"].tolist()


def test_answers_are_spans_of_their_contexts(folder):
    model = a_model("question-answering", folder("question-answering"), window=64, overlap=16)
    contexts = [text + b" " + b" ".join(some_texts(6, seed=number)) for number, text in enumerate(some_texts(12))]
    questions = some_texts(12, seed=9)
    questions = [question[:24] for question in questions]
    answers = infer(model, question=questions, context=contexts)
    for row, context in enumerate(contexts):
        alone = infer(model, question=[questions[row]], context=[context])
        assert answers["answer"][row] == context.decode()[answers["start"][row] : answers["end"][row]].encode()
        assert (answers["start"][row], answers["end"][row]) == (alone["start"][0], alone["end"][0])
        assert answers["score"][row] == pytest.approx(alone["score"][0], abs=TOLERANCE)
    assert len(set(answers["start"].tolist())) > 1


def test_empty_text_is_answered_unless_it_has_no_token(folder):
    model: Any = a_model("text-classification", folder("text-classification"))
    assert len(infer(model, text=[b"well", b""])["label"]) == 2

    model.network.tokenizer.backend_tokenizer.post_processor = processors.Sequence([])
    with pytest.raises(InvalidRow, match="a text is empty; send text"):
        infer(model, text=[b"well", b""])


def test_longer_text_is_cut_if_the_variant_says_so(folder):
    model = a_model("text-classification", folder("text-classification"), truncate=True, max_tokens=16)
    long, cut = infer(model, text=[b"word " * 200]), infer(model, text=[b"word " * 100])
    assert long["score"] == pytest.approx(cut["score"])


def huge_png() -> bytes:
    """A PNG file whose header claims 50,000 × 50,000 pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return start + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


def wav_claiming(samples: int) -> bytes:
    """A WAV file of half a second whose header claims another number of samples."""
    file = wav_of(0.5)
    return file[:40] + struct.pack("<I", 2 * samples) + file[44:]


BAD_ROWS: dict[Medium, dict[str, tuple[bytes, str]]] = {
    "text": {
        "no UTF-8": (b"\xff\xfe text", "row 1 is not UTF-8 at byte 0"),
        "a megabyte": (b"word " * 200_000, r"row 1 has 1000000 bytes; send \d to \d+"),
    },
    "image": {
        "empty": (b"", "image 1"),
        "no image": (b"no image at all", "image 1"),
        "GIF without a picture": (b"GIF89a", "image 1"),
        "PNG without a header": (b"\x89PNG\r\n\x1a\n" + b"\0" * 64, "image 1"),
        "cut off": (some_images(2)[1][:200], "image 1"),
        "2.5 gigapixels": (huge_png(), "image 1"),
    },
    "audio": {
        "empty": (b"", "row 1 is no audio file"),
        "cut off": (b"RIFF" + b"\0" * 64, "row 1 is no audio file"),
        "0 samples": (wav_of(0), "row 1 has 0 s of audio; send 0.025 to 30 s"),
        "an hour": (wav_of(3600, rate_hz=1000), "row 1 has 3600 s of audio; send 0.025 to 30 s"),
        "another rate": (wav_of(1, rate_hz=200), "row 1 has 200 Hz and 1 channels; send 1000 to 192000 Hz"),
        "claims 0 samples": (wav_claiming(0), "row 1 has 0 s of audio; send 0.025 to 30 s"),
    },
}


@pytest.mark.parametrize(
    ("task", "kind"), [(name[3:], kind) for name, task in HF_FAMILIES.items() for kind in BAD_ROWS[task.medium]]
)
def test_bad_row_is_its_callers_fault(folder, task, kind):
    row, complaint = BAD_ROWS[HF_FAMILIES[f"hf/{task}"].medium][kind]
    model, rows = a_model(task, folder(task), **PARAMETERS.get(task, {})), mixed_rows(task, 2)
    for name in rows:
        with pytest.raises(InvalidRow, match=complaint) as refused:
            infer(model, **rows | {name: [rows[name][0], row]})
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("task", "changed", "complaint"),
    [
        ("text-classification", {"text": b"word " * 600}, r"a text has \d+ tokens; send at most 512"),
        ("question-answering", {"question": b""}, "row 1 is empty; send text"),
        ("question-answering", {"question": b"word " * 70}, r"a question has \d+ tokens; send at most 30"),
        (
            "question-answering",
            {"context": b"word " * 2_000},
            r"a context has \d+ windows of 64 tokens; send at most 16",
        ),
    ],
)
def test_text_with_too_many_tokens_is_refused(folder, task, changed, complaint):
    model, rows = a_model(task, folder(task), **PARAMETERS.get(task, {})), mixed_rows(task, 2)
    with pytest.raises(InvalidRow, match=complaint):
        infer(model, **rows | {name: [rows[name][0], row] for name, row in changed.items()})


class Reached(Exception):
    """The network was called, with tensors on these devices."""

    def __init__(self, *args: Any, **inputs: Any) -> None:
        tensors = [value for value in (*args, *inputs.values()) if isinstance(value, torch.Tensor)]
        self.devices = {tensor.device.type for tensor in tensors}


def reach(*args: Any, **inputs: Any) -> None:
    raise Reached(*args, **inputs)


@pytest.mark.parametrize("task", TASKS)
def test_network_and_inputs_are_on_the_gpu(folder, task):
    """The meta device stands for a GPU."""
    model: Any = a_model(task, folder(task), **PARAMETERS.get(task, {}))
    network = model.network
    network.move_to(torch.device("meta"))
    network.model.forward = network.model.generate = reach
    if task == "image-embedding":
        network.model.get_image_features = reach
    with pytest.raises(Reached) as reached:
        infer(model, **mixed_rows(task, 2))
    assert reached.value.devices == {parameter.device.type for parameter in network.model.parameters()} == {"meta"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("task", TASKS)
def test_answers_on_a_gpu_are_those_on_cores(folder, task):
    spec, rows = a_spec(task, folder(task), **PARAMETERS.get(task, {})), mixed_rows(task, 16)
    expected = infer(load_model(spec), **rows)
    for name, answers in infer(load_model(spec.model_copy(update={"gpus": 1})), **rows).items():
        if answers.dtype.kind in "Oi":
            assert np.mean(answers == expected[name]) > 0.9
        else:
            np.testing.assert_allclose(answers, expected[name], rtol=0.01, atol=0.01)


@pytest.mark.parametrize("precision", ["BF16", "FP16", "INT8"])
@pytest.mark.parametrize("task", TASKS)
def test_task_computes_in_each_precision(folder, task, precision):
    model: Any = a_model(task, folder(task), precision=precision, **PARAMETERS.get(task, {}))
    answers = infer(model, **mixed_rows(task, 4))
    assert all(len(values) for values in answers.values())
    assert {parameter.dtype for parameter in model.network.model.parameters()} == {DTYPES[precision]}


@pytest.mark.parametrize("task", TASKS)
def test_int8_answers_are_near_and_independent_of_the_batch(folder, task):
    path, rows, parameters = folder(task), mixed_rows(task, 24), PARAMETERS.get(task, {})
    exact = infer(a_model(task, path, **parameters), **rows)
    model: Any = a_model(task, path, precision="INT8", **parameters)
    rounded = infer(model, **rows)
    alone = [infer(model, **{name: values[row : row + 1] for name, values in rows.items()}) for row in range(24)]
    assert any(isinstance(layer, Int8Linear) for layer in model.network.model.modules())
    for name in rounded.keys() & {"text", "answer", "score", "embedding"}:
        same = np.concatenate([answer[name] for answer in alone])
        if same.dtype.kind == "O":
            assert np.mean(rounded[name] == same) > 0.9  # noise of convolutions may change how a value is rounded
        else:
            np.testing.assert_allclose(rounded[name], same, atol=0.01)
            assert abs(rounded[name].mean() - exact[name].mean()) < 0.05
            assert len(rounded[name]) != len(exact[name]) or np.abs(rounded[name] - exact[name]).mean() < 0.05


def test_int8_is_refused_on_a_gpu(folder):
    model: Any = a_model("text-classification", folder("text-classification"), precision="INT8")
    with pytest.raises(ModelError, match="precision INT8 is computed on cores alone"):
        model.network.move_to(torch.device("meta"))


def test_unsupported_parameter_is_refused_by_name(folder):
    for name, value in (("precision", "INT4"), ("compile", "tensorrt")):
        with pytest.raises(ModelError, match=rf"parameters\.{name}"):
            a_model("text-classification", folder("text-classification"), **{name: value})


def pickle_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()
    torch.save({}, path / "pytorch_model.bin")


def write_foreign_tokenizer(path: Path) -> None:
    other = miniatures.word_tokenizer()
    other.add_tokens([f"more{number}" for number in range(miniatures.VOCABULARY)])
    other.save_pretrained(path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda path: (path / "tokenizer.json").unlink(), "the tokenizer cannot be read"),
        (lambda path: (path / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda path: (path / "model.safetensors").write_bytes(b"short"), "AutoModelForSequenceClassification: "),
        (lambda path: (path / "model.safetensors").unlink(), "safetensors"),
        (pickle_weights, "safetensors"),
        (write_foreign_tokenizer, "they belong to different checkpoints"),
        (
            lambda path: miniatures.encoder("Roberta", path, "text-embedding"),
            "tensor 'classifier.dense.bias' is missing; the checkpoint is of RobertaModel",
        ),
        (miniatures.vit, "AutoModelForSequenceClassification: |ViT"),
    ],
    ids=["no tokenizer", "no JSON", "cut off", "no weights", "a pickle", "vocabulary", "another task", "images"],
)
def test_unusable_checkpoint_is_named(tmp_path, change, complaint):
    path = miniatures.encoder("Roberta", tmp_path, "text-classification")
    change(path)
    with pytest.raises(ModelError, match=complaint) as refused:
        a_model("text-classification", path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500
