"""Payload sources: chats, pages, jobs, random tensors, and labelled samples of users."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.builders import a_pipeline, a_stage
from tests.loadtester import fake_pipeline
from tests.training.digits_av.test_dataset import SPEAKERS, a_recording_file
from trimtab_loadtester.load_spec import LoadError
from trimtab_loadtester.multimodal.traffic import Request
from trimtab_loadtester.payloads.digits_av import DigitsAvPayloads, JobOptions
from trimtab_loadtester.payloads.interface import Outputs, Score
from trimtab_loadtester.payloads.labelled import LabelledPayloads, SamplesError, agreement
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
    payload = payload_source(fake_pipeline.a_pipeline("lmm-digits: pages=2")).payload(0)

    assert {tensor.name: tensor.shape for tensor in payload.inputs} == {"messages": (1,), "images": (1, 2)}


def test_only_the_result_of_a_spoken_sum_is_correct():
    source = payload_source(fake_pipeline.a_pipeline("spoken-sums"), seed=2)
    payload = source.payload(0)
    said = [str(payload.truth).encode(), b"-1"]

    scores = [source.score(payload.truth, {"label": np.array([label], dtype=object)}) for label in said]

    assert payload.inputs[0].array.item().startswith(b"RIFF")
    assert [(score.correct, score.total) for score in scores] == [(1, 1), (0, 1)]


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
    with pytest.raises(LoadError, match=r"load 'multimodal:rps=5' sets the images of each chat"):
        require_chats(fake_pipeline.a_pipeline(annotation), "multimodal:rps=5", given)
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
    inputs = [
        {"name": "question", "datatype": "INT64", "shape": [-1]},
        {"name": "threshold", "datatype": "FP32", "shape": [2]},
    ]
    pipeline = a_pipeline([a_stage(source="request.inputs.threshold")], inputs=inputs)
    pipeline.metadata.annotations["trimtab.dev/payloads"] = "question=squad-question"
    source = payload_source(pipeline, seed=2)

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
    source = payload_source(fake_pipeline.a_pipeline("digits-av: rows=3..3"), seed=2)

    assert rows_of(source.payload(0)) == 3


def pipeline_of(datatype: str = "FP32", shape: tuple[int, ...] = (2,), gives: str = "INT64") -> InferencePipeline:
    stage = a_stage(outputs=[{"name": "y", "datatype": gives, "shape": []}])
    return a_pipeline([stage], inputs=[{"name": "x", "datatype": datatype, "shape": [*shape]}])


def json_lines(folder: Path, *samples: object) -> str:
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return str(folder)


def sent(source: LabelledPayloads) -> list[list[object]]:
    return sorted(source.payload(index).inputs[0].array.tolist() for index in range(len(source)))


def test_json_lines_contain_numbers_or_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([3.0, 4.0], np.float32))
    where = json_lines(
        tmp_path, {"inputs": {"x": [1, 2]}, "outputs": {"y": 7}}, {"inputs": {"x": "a.npy"}, "outputs": {"y": 8}}
    )
    source = LabelledPayloads(pipeline_of(), where)

    assert sent(source) == [[[1.0, 2.0]], [[3.0, 4.0]]]
    assert {source.payload(index).truth["y"] for index in (0, 1)} == {7, 8}  # type: ignore[index]
    assert source.payload(0).inputs[0].array.tolist() == source.payload(2).inputs[0].array.tolist()


@pytest.mark.parametrize("value", [[{"file": "a.png"}, {"file": "b.png"}], [{"file": "a.png"}, "second"]])
def test_images_of_a_chat_may_be_files(tmp_path: Path, value) -> None:
    for name, content in (("a.png", b"first"), ("b.png", b"second")):
        (tmp_path / name).write_bytes(content)
    given = ({"inputs": {"x": images}, "outputs": {"y": 7}} for images in (value, {"file": "a.png"}))
    source = LabelledPayloads(pipeline_of("BYTES", (-1,)), json_lines(tmp_path, *given))

    assert sent(source) == [[[b"first"]], [[b"first", b"second"]]]


def test_table_has_columns_and_optional_byte_order_mark(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([3.0, 4.0]))
    (tmp_path / "samples.csv").write_text("x,y\na.npy,5\n", encoding="utf-8-sig")
    payload = LabelledPayloads(pipeline_of(), str(tmp_path)).payload(0)
    assert (payload.inputs[0].array.tolist(), payload.truth) == ([[3.0, 4.0]], {"y": 5})


@pytest.mark.parametrize("text", ["42", "007", "nan", "1_000", "1e5", "true", "cat"])
def test_label_of_a_text_output_is_text(tmp_path: Path, text: str) -> None:
    np.save(tmp_path / "a.npy", np.array([3.0, 4.0]))
    (tmp_path / "samples.csv").write_text(f"x,y\na.npy,{text}\n")
    source = LabelledPayloads(pipeline_of(gives="BYTES"), str(tmp_path))
    truth, answer = source.payload(0).truth, text.encode()

    assert truth == {"y": text}
    assert source.score(truth, {"y": np.array([answer], object)}) == Score(1, 1)
    assert source.score(truth, {"y": np.array([[answer]], object)}) == Score(1, 1)
    assert source.score(truth, {"y": np.array([b"4\xff"], object)}) == Score(0, 1)


@pytest.mark.parametrize(("written", "answer"), [("true", True), ("False", False), ("1", True), ("0", False)])
def test_table_parses_booleans(tmp_path: Path, written, answer) -> None:
    np.save(tmp_path / "a.npy", np.array([3.0, 4.0]))
    (tmp_path / "samples.csv").write_text(f"x,y\na.npy,{written}\n")
    source = LabelledPayloads(pipeline_of(gives="BOOL"), str(tmp_path))

    truth = source.payload(0).truth
    assert [source.score(truth, {"y": np.array([given])}).correct for given in (answer, not answer)] == [1, 0]


@pytest.mark.parametrize(
    ("output", "written", "complaint"),
    [
        ("INT64", "cat", r"samples.csv, line 3: column 'y': 'cat' is not INT64; write a number"),
        ("FP32", "", r"line 3: column 'y': '' is not FP32; write a number"),
        ("BOOL", "yes", r"line 3: column 'y': 'yes' is not BOOL; write true or false"),
    ],
)
def test_table_with_labels_of_another_type_is_rejected(tmp_path: Path, output, written, complaint) -> None:
    (tmp_path / "samples.csv").write_text(f"x,y\na.npy,1\nb.npy,{written}\n")
    with pytest.raises(SamplesError, match=complaint):
        LabelledPayloads(pipeline_of(gives=output), str(tmp_path))


@pytest.mark.parametrize(
    ("datatype", "shape", "first"),
    [
        ("UINT8", (1, 2, 2), [[[[200, 200], [200, 200]]]]),
        ("UINT8", (2, 2), [[[200, 200], [200, 200]]]),
        ("FP32", (1, 1, 3), [[[[pytest.approx(200 / 255)] * 3]]]),
    ],
)
def test_images_by_label_have_the_input_layout(tmp_path: Path, datatype, shape, first) -> None:
    for label in ("3", "11"):
        (tmp_path / label).mkdir()
        Image.new("RGB", (4, 4), (200, 200, 200)).save(tmp_path / label / "a.png")
    source = LabelledPayloads(pipeline_of(datatype, shape), str(tmp_path))
    assert source.payload(0).inputs[0].array.tolist() == first
    assert {source.payload(index).truth["y"] for index in (0, 1)} == {3, 11}  # type: ignore[index]


def test_user_class_loads_and_scores_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_samples.py").write_text(
        "import numpy as np\n"
        "class Pairs:\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, i): return {'x': np.full(2, i)}, i\n"
        "    def score(self, truth, outputs): return (int(truth == outputs['y'][0]), 3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = LabelledPayloads(pipeline_of(), "acme_samples:Pairs")
    assert sent(source) == [[[0.0, 0.0]], [[1.0, 1.0]]]
    assert source.score(1, {"y": np.array([1])}) == Score(1, 3)


@pytest.mark.parametrize(
    ("truth", "answer", "right"),
    [
        (2, np.array([2]), True),
        (2, np.array([3]), False),
        (2, np.array([[0.1, 0.2, 0.9]], np.float32), True),  # logits
        (1, np.array([[0.1, 0.2, 0.9]], np.float32), False),
        ([4, 5], np.array([4, 5]), True),  # as many rows as there were found
        ([4, 5], np.array([4]), False),
        (0.5, np.array([0.50001], np.float32), True),
        (0.5, np.array([0.6], np.float32), False),
        ("cat", np.array([b"cat"], object), True),
        ("cat", np.array([b"dog"], object), False),
        (42, np.array([b"42"], object), True),
        (["a", "b"], np.array([b"a", b"b"], object), True),
        ("cat", np.array([2]), False),
        (["cat"], np.array([2]), False),
        (None, np.array([2]), False),
        (True, np.array([True]), True),
    ],
)
def test_response_equal_to_the_label_is_correct(tmp_path: Path, truth, answer, right) -> None:
    source = LabelledPayloads(pipeline_of(), json_lines(tmp_path, {"inputs": {"x": [1, 2]}, "outputs": {"y": 1}}))
    assert source.score({"y": truth}, {"y": answer}) == Score(int(right), 1)


@pytest.mark.parametrize(
    ("sample", "complaint"),
    [
        ({"inputs": {"z": [1, 2]}, "outputs": {"y": 1}}, r"samples.jsonl, line 1: no input 'z'; there are: x"),
        ({"inputs": {"x": [1, 2]}, "outputs": {"z": 1}}, "line 1: no output 'z'; there are: y"),
        ({"inputs": {"x": [1, 2]}, "outputs": {}}, "line 1: no right answer; give one of the outputs: y"),
        ({"inputs": {"x": [1, 2, 3]}, "outputs": {"y": 1}}, r"input 'x' has shape \[3\]; it must be \[2\]"),
        ({"inputs": {"x": "b.npy"}, "outputs": {"y": 1}}, "line 1: input 'x': there is no file .*b.npy"),
        ({"x": 1}, r'line 1: .* write {"inputs": {"x": …}, "outputs": {"y": …}}'),
    ],
)
def test_invalid_sample_is_reported_by_file_and_line(tmp_path: Path, sample, complaint) -> None:
    where = json_lines(tmp_path, sample)
    with pytest.raises(SamplesError, match=complaint):
        LabelledPayloads(pipeline_of(), where).payload(0)


def test_optional_labels_are_missing_for_all_or_none(tmp_path: Path) -> None:
    for folder in ("flat", "lines", "table", "mixed"):
        (tmp_path / folder).mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4), (200, 200, 200)).save(tmp_path / "flat" / name)
    values = {"inputs": {"x": [[1, 2], [3, 4]]}}
    json_lines(tmp_path / "lines", values, values | {"outputs": None})
    (tmp_path / "table" / "samples.csv").write_text("x\n../flat/a.png\n../flat/b.png\n")
    json_lines(tmp_path / "mixed", values, values | {"outputs": {"y": 1}})
    pipeline = pipeline_of("UINT8", (2, 2))

    for folder in ("flat", "lines", "table"):
        source = LabelledPayloads(pipeline, str(tmp_path / folder), labels="Optional")
        assert (len(source), source.labelled) == (2, False)
        assert (source.payload(0).inputs[0].array.shape, source.payload(0).truth) == ((1, 2, 2), None)
        with pytest.raises(SamplesError, match=r"no right answer|nor a folder of images for each label"):
            LabelledPayloads(pipeline, str(tmp_path / folder))
    with pytest.raises(SamplesError, match="line 1: no right answer; give one of the outputs: y"):
        LabelledPayloads(pipeline, str(tmp_path / "mixed"), labels="Optional")


def test_user_class_is_labelled_if_its_first_sample_is(tmp_path, monkeypatch) -> None:
    (tmp_path / "acme_bare.py").write_text(
        "import numpy as np\n"
        "class Bare:\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, i): return {'x': np.full(2, i)}, None\n"
        "class Judged(Bare):\n"
        "    def score(self, truth, outputs): return True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    bare = LabelledPayloads(pipeline_of(), "acme_bare:Bare", labels="Optional")

    assert not bare.labelled
    assert LabelledPayloads(pipeline_of(), "acme_bare:Judged", labels="Optional").labelled, "it judges by itself"
    with pytest.raises(SamplesError, match="a sample has no right answer"):
        bare.score(None, {"y": np.array([1])})


def test_pickles_are_rejected(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], object))
    where = json_lines(tmp_path, {"inputs": {"x": "a.npy"}, "outputs": {"y": 1}})
    with pytest.raises(SamplesError, match="allow_pickle=False"):
        LabelledPayloads(pipeline_of(), where).payload(0)


def test_digest_depends_on_content_not_on_format(tmp_path: Path) -> None:
    for name in ("one", "two", "other"):
        (tmp_path / name).mkdir()
    np.save(tmp_path / "two" / "a.npy", np.array([1.0, 2.0]))
    one = json_lines(tmp_path / "one", {"inputs": {"x": [1, 2]}, "outputs": {"y": 1}})
    (tmp_path / "two" / "samples.csv").write_text("x,y\na.npy,1\n")
    other = json_lines(tmp_path / "other", {"inputs": {"x": [1, 2]}, "outputs": {"y": 2}})
    digests = [LabelledPayloads(pipeline_of(), where).digest() for where in (one, str(tmp_path / "two"), other)]
    assert digests[0] == digests[1] != digests[2]
    assert digests[0].startswith("sha256:")


@pytest.mark.parametrize(
    ("reference", "outputs", "score"),
    [
        ({"digit": np.array([1, 2, 3])}, {"digit": np.array([1, 2, 4])}, Score(2, 3)),
        ({"digit": np.array([1, 2, 3])}, {"digit": np.array([1, 2])}, Score(0, 3)),
        ({"digit": np.array([], np.int64)}, {"digit": np.array([], np.int64)}, Score(1, 1)),
        ({"text": np.array([b"a"], object)}, {"text": np.array([b"b"], object)}, Score(0, 1)),
        ({"logits": np.array([[0.1, 0.9]])}, {"logits": np.array([[0.4, 0.6]])}, Score(1, 1)),
        ({"price": np.array([[1.0]])}, {"price": np.array([[1.2]])}, Score(0, 1)),
        (
            {"digit": np.array([1, 2]), "box": np.array([[0.1], [0.2]])},
            {"digit": np.array([1, 2]), "box": np.array([[9.0], [9.0]])},
            Score(2, 2),
        ),
    ],
)
def test_agreement_compares_results_row_by_row(reference, outputs, score):
    assert agreement(reference, outputs) == score
