"""Payload sources: chats, digit pages, jobs of several modalities, and random tensors, without duplicates."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.builders import a_pipeline, a_pipeline_document, a_stage
from tests.training.digits_av.test_dataset import SPEAKERS, a_recording_file
from trimtab_loadtester.load_spec import LoadError
from trimtab_loadtester.multimodal.traffic import Request
from trimtab_loadtester.payloads.digits_av import DigitsAvPayloads, JobOptions
from trimtab_loadtester.payloads.interface import Outputs, Score
from trimtab_loadtester.payloads.lmm_digits import ChatPayloads, DrawnChats, parse_pages
from trimtab_loadtester.payloads.sources import DigitPayloads, SyntheticPayloads, payload_source, require_chats
from trimtab_model_servers.families.digits_av import family
from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.tensors import TensorSpec
from trimtab_training.digits.page_generator import Page

LMM_DIGITS = Path(__file__).parents[2] / "pipelines" / "lmm-digits"
PNG = b"\x89PNG"


def test_chat_has_a_placeholder_for_each_image():
    source = ChatPayloads(seed=3)
    seen = set()
    for index in range(12):
        payload, again = source.payload(index), source.payload(index)
        tensors = {tensor.name: tensor.array for tensor in payload.inputs}
        content = json.loads(tensors["messages"][0])[0]["content"]
        images = tensors.get("images", np.empty((1, 0)))[0].tolist()
        seen.add(len(images))
        assert [part["type"] for part in content] == ["image"] * len(images) + ["text"]
        assert all(image.startswith(PNG) for image in images)
        assert payload.truth == again.truth
    assert seen == {0, 1, 2, 3}


def test_only_the_exact_answer_is_correct():
    source = ChatPayloads(seed=3)
    truth = str(source.payload(0).truth)

    scores = [source.score(truth, {"text": np.array([said], dtype=object)}) for said in (truth.encode(), b"", b"no")]

    assert [(score.correct, score.total) for score in scores] == [(1, 1), (0, 1), (0, 1)]


def test_page_count_comes_from_the_annotation():
    pipeline = a_pipeline()
    pipeline.metadata.annotations["trimtab.dev/payloads"] = "lmm-digits: pages=2"
    payload = payload_source(pipeline).payload(0)

    assert {tensor.name: tensor.shape for tensor in payload.inputs} == {"messages": (1,), "images": (1, 2)}


@pytest.mark.parametrize("written", ["page=1", "pages=", "pages=one", "pages=1..x", "3"])
def test_invalid_annotation_is_rejected(written):
    with pytest.raises(ValueError, match=r"pages=0\.\.3"):
        parse_pages(written)


def test_too_many_pages_are_rejected():
    with pytest.raises(ValueError, match=r"within 0\.\.3"):
        ChatPayloads(0, "pages=1..9")


def shown_by(payload):
    tensors = {tensor.name: tensor.array for tensor in payload.inputs}
    return tensors["images"][0].tolist() if "images" in tensors else []


def test_chat_has_the_requested_unique_images():
    source = ChatPayloads(seed=3)
    seen = [
        image
        for index, images in enumerate((0, 1, 4, 16))
        for image in shown_by(source.chat_with_images(index, images))
    ]

    assert len(seen) == len(set(seen)) == 21
    payload = source.chat_with_images(3, 16)
    content = json.loads(payload.inputs[0].array[0])[0]["content"]
    assert [part["type"] for part in content] == ["image"] * 16 + ["text"]
    assert payload.truth == source.chat_with_images(3, 3).truth
    assert payload.images == 16


def test_sampled_chats_have_the_images_of_their_requests():
    source = DrawnChats([Request(0.0, 9, 0), Request(0.5, 9, 4), Request(0.7, 9, 1)], seed=1)

    assert [source.payload(index).images for index in range(3)] == [0, 4, 1]


@pytest.mark.parametrize(("annotation", "given"), [("random", None), ("lmm-digits", "mine")])
def test_multimodal_load_without_chats_is_rejected(annotation, given):
    pipeline = a_pipeline()
    pipeline.metadata.annotations["trimtab.dev/payloads"] = annotation

    with pytest.raises(LoadError, match=r"load 'multimodal:rps=5' sets the images of each chat"):
        require_chats(pipeline, "multimodal:rps=5", given)
    require_chats(load_pipeline(LMM_DIGITS), "multimodal:rps=5", None)


@pytest.mark.parametrize(
    ("datatype", "shape", "expected"),
    [
        ("FP32", (3, -1), (1, 3, 16)),
        ("UINT8", (4,), (1, 4)),
        ("INT64", (), (1,)),
        ("BOOL", (2,), (1, 2)),
        ("BYTES", (2,), (1, 2)),
    ],
)
def test_random_payloads_have_the_declared_shape_and_type(datatype, shape, expected) -> None:
    source = SyntheticPayloads((TensorSpec(name="x", datatype=datatype, shape=shape),), seed=5)

    (tensor,) = source.payload(3).inputs
    assert (tensor.name, tensor.datatype, tensor.shape) == ("x", datatype, expected)
    assert np.array_equal(tensor.array, source.payload(3).inputs[0].array)
    assert source.score(None, {}) == Score(0, 0)


def test_random_payloads_differ() -> None:
    source = SyntheticPayloads((TensorSpec(name="x", datatype="FP32", shape=(8,)),))

    assert len({source.payload(index).inputs[0].array.tobytes() for index in range(50)}) == 50


def test_digit_payloads_have_the_labels_of_the_page() -> None:
    source = DigitPayloads(seed=1)
    payload = source.payload(4)
    (image,) = payload.inputs
    truth = payload.truth
    assert isinstance(truth, Page)

    assert (image.name, image.datatype, image.shape) == ("image", "UINT8", (1, 1, 96, 96))
    right: Outputs = {"boxes": truth.boxes, "digit": truth.labels}
    wrong: Outputs = {"boxes": truth.boxes, "digit": (truth.labels + 1) % 10}
    nothing: Outputs = {"boxes": np.empty((0, 4), np.float32), "digit": np.empty(0, np.int64)}
    digits = len(truth.labels)
    assert source.score(truth, right) == Score(digits, digits)
    assert source.score(truth, wrong) == source.score(truth, nothing) == Score(0, digits)
    with pytest.raises(KeyError, match="boxes"):
        source.score(truth, {"digit": truth.labels})


def test_synthetic_payloads_follow_their_distribution() -> None:
    specs = (
        TensorSpec(name="question", datatype="INT64", shape=(-1,)),
        TensorSpec(name="threshold", datatype="FP32", shape=(2,)),
    )
    inputs = [spec.model_dump(mode="json") for spec in specs]
    document = a_pipeline_document([a_stage(source="request.inputs.threshold")], inputs=inputs)
    document["metadata"]["annotations"] = {"trimtab.dev/payloads": "question=squad-question"}
    source = payload_source(InferencePipeline.model_validate(document), seed=2)

    lengths = set()
    for index in range(20):
        question, threshold = source.payload(index).inputs
        assert (question.shape, threshold.shape) == ((1, 64), (1, 2))
        assert np.array_equal(question.array, source.payload(index).inputs[0].array)
        lengths.add(int((question.array >= 0).sum()))
    assert len(lengths) > 5
    assert source.score(None, {}) == Score(0, 0)


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch):
    monkeypatch.setattr("trimtab_loadtester.payloads.digits_av.POOL_ROWS", 120)


def rows_of(job):
    return len(np.asarray(job.truth))


def test_job_has_rows_of_all_modalities_and_labels():
    source = DigitsAvPayloads(3, JobOptions(rows=(2, 5)))
    jobs = [source.payload(index) for index in range(40)]

    assert {rows_of(job) for job in jobs} == {2, 3, 4, 5}
    for job in jobs:
        assert [(t.name, t.datatype, t.shape[1:]) for t in job.inputs] == [
            ("audio", "INT16", (6400,)),
            ("video", "UINT8", (4, 24, 24)),
            ("text", "UINT8", (6,)),
        ]
        assert {t.shape[0] for t in job.inputs} == {rows_of(job)}
    again = DigitsAvPayloads(3, JobOptions(rows=(2, 5))).payload(7)
    assert again.inputs[0].array.tobytes() == jobs[7].inputs[0].array.tobytes()


def test_some_jobs_lack_modalities_but_never_all():
    source = DigitsAvPayloads(1, JobOptions(missing=0.5))
    brought = [len(source.payload(index).inputs) for index in range(300)]

    assert set(brought) == {1, 2, 3}
    assert 0.4 < np.mean(np.array(brought) < 3) < 0.6


def test_class_distribution_can_be_skewed():
    source = DigitsAvPayloads(1, JobOptions(rows=(64, 64), skew=5.0))
    digits = np.concatenate([np.asarray(source.payload(index).truth) for index in range(20)])

    assert (digits < 5).sum() / (digits >= 5).sum() == pytest.approx(5.0, rel=0.35)


def test_responses_are_scored_per_row():
    source = DigitsAvPayloads(1)
    truth = np.array([1, 2, 3])

    score = source.score(truth, {"digit": np.array([1, 2, 0])})
    assert score == Score(2, 3)
    assert score.row_correct is not None
    assert score.row_correct.tolist() == [True, True, False]
    assert source.score(truth, {"digit": np.array([1, 2])}) == Score(0, 3)
    with pytest.raises(KeyError, match="digit"):
        source.score(truth, {})


def test_jobs_can_request_an_accuracy():
    source = DigitsAvPayloads(1, JobOptions.parse("floor=0.7..0.9"))
    floors = [float(source.payload(index).parameters["trimtab.accuracy_floor"]) for index in range(200)]

    assert 0.7 <= min(floors) < 0.72
    assert 0.88 < max(floors) <= 0.9
    assert not DigitsAvPayloads(1).payload(0).parameters


def test_audio_may_come_from_held_out_speakers(tmp_path):
    folder = a_recording_file(tmp_path, [*SPEAKERS, "ada"])
    synthesised = DigitsAvPayloads(1).payload(0)
    weights = tmp_path / "weights.safetensors"
    family.save(
        family.build_network(family.VARIANTS["late"], seed=0), weights, {family.SPEAKERS_KEY: json.dumps(SPEAKERS)}
    )
    recorded = DigitsAvPayloads(1, JobOptions(recordings=folder, weights=weights)).payload(0)
    ada = DigitsAvPayloads(1, JobOptions(recordings=folder, speakers=("ada",))).payload(0)
    assert recorded.inputs[0].array.tobytes() == ada.inputs[0].array.tobytes()

    assert recorded.inputs[0].array.tobytes() != synthesised.inputs[0].array.tobytes()
    all_speakers = JobOptions.parse(f"recordings={folder}, speakers={'+'.join(SPEAKERS)}")
    assert DigitsAvPayloads(1, all_speakers).payload(0).inputs[0].array.tobytes() != recorded.inputs[0].array.tobytes()


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("rows=0..3", "must lie between 1 and 4096"),
        ("rows=9..3", "the smaller first"),
        ("missing=2", "missing 2 must lie between 0 and 1"),
        ("rows=many", "rows cannot be 'many'"),
        ("colour=red", "'colour=red' is not one of rows, missing"),
        ("rows=1, rows=2", "each once"),
        ("skew=0", "must be above 0"),
        ("recordings=FOLDER", "name speakers, or weights=FILE"),
        ("floor=0.9..0.7", "the smaller first"),
    ],
)
def test_invalid_options_are_reported_by_name(written, words):
    with pytest.raises(ValueError, match=words):
        JobOptions.parse(written)


def test_pipeline_annotation_selects_these_payloads():
    document = a_pipeline_document()
    document["metadata"]["annotations"] = {"trimtab.dev/payloads": "digits-av: rows=3..3"}
    source = payload_source(InferencePipeline.model_validate(document), seed=2)

    assert rows_of(source.payload(0)) == 3
