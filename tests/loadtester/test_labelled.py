"""User samples: from JSON lines, a table, folders of images, or a class of the user's."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.builders import a_pipeline_document, a_stage
from trimtab_loadtester.payloads.interface import Score
from trimtab_loadtester.payloads.labelled import LabelledPayloads, SamplesError
from trimtab_pipelines.spec import InferencePipeline


def a_pipeline(datatype: str = "FP32", shape: tuple[int, ...] = (2,), gives: str = "INT64") -> InferencePipeline:
    given = {"name": "y", "datatype": gives, "shape": []}
    document = a_pipeline_document([a_stage("first", "request.inputs.x", outputs=[given])])
    document["spec"]["inputs"] = [{"name": "x", "datatype": datatype, "shape": [*shape]}]
    document["spec"]["outputs"] = [{"name": "y", "from": "first.outputs.y"}]
    return InferencePipeline.model_validate(document)


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
    source = LabelledPayloads(a_pipeline(), where)

    assert sent(source) == [[[1.0, 2.0]], [[3.0, 4.0]]]
    assert {source.payload(index).truth["y"] for index in (0, 1)} == {7, 8}  # type: ignore[index]
    assert source.payload(0).inputs[0].array.tolist() == source.payload(2).inputs[0].array.tolist()


def test_table_has_columns_and_optional_byte_order_mark(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([3.0, 4.0]))
    (tmp_path / "samples.csv").write_text("x,y\na.npy,5\n", encoding="utf-8-sig")
    payload = LabelledPayloads(a_pipeline(), str(tmp_path)).payload(0)
    assert (payload.inputs[0].array.tolist(), payload.truth) == ([[3.0, 4.0]], {"y": 5})


@pytest.mark.parametrize("text", ["42", "007", "nan", "1_000", "1e5", "true", "cat"])
def test_label_of_a_text_output_is_text(tmp_path: Path, text: str) -> None:
    np.save(tmp_path / "a.npy", np.array([3.0, 4.0]))
    (tmp_path / "samples.csv").write_text(f"x,y\na.npy,{text}\n")
    source = LabelledPayloads(a_pipeline(gives="BYTES"), str(tmp_path))
    truth, answer = source.payload(0).truth, text.encode()

    assert truth == {"y": text}
    assert source.score(truth, {"y": np.array([answer], object)}) == Score(1, 1)
    assert source.score(truth, {"y": np.array([[answer]], object)}) == Score(1, 1)
    assert source.score(truth, {"y": np.array([b"4\xff"], object)}) == Score(0, 1)


@pytest.mark.parametrize(("written", "answer"), [("true", True), ("False", False), ("1", True), ("0", False)])
def test_table_parses_booleans(tmp_path: Path, written, answer) -> None:
    np.save(tmp_path / "a.npy", np.array([3.0, 4.0]))
    (tmp_path / "samples.csv").write_text(f"x,y\na.npy,{written}\n")
    source = LabelledPayloads(a_pipeline(gives="BOOL"), str(tmp_path))

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
        LabelledPayloads(a_pipeline(gives=output), str(tmp_path))


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
    source = LabelledPayloads(a_pipeline(datatype, shape), str(tmp_path))
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
    source = LabelledPayloads(a_pipeline(), "acme_samples:Pairs")
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
    source = LabelledPayloads(a_pipeline(), json_lines(tmp_path, {"inputs": {"x": [1, 2]}, "outputs": {"y": 1}}))
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
        LabelledPayloads(a_pipeline(), where).payload(0)


def test_optional_labels_are_missing_for_all_or_none(tmp_path: Path) -> None:
    for folder in ("flat", "lines", "table", "mixed"):
        (tmp_path / folder).mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4), (200, 200, 200)).save(tmp_path / "flat" / name)
    values = {"inputs": {"x": [[1, 2], [3, 4]]}}
    json_lines(tmp_path / "lines", values, values | {"outputs": None})
    (tmp_path / "table" / "samples.csv").write_text("x\n../flat/a.png\n../flat/b.png\n")
    json_lines(tmp_path / "mixed", values, values | {"outputs": {"y": 1}})
    pipeline = a_pipeline("UINT8", (2, 2))

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
    bare = LabelledPayloads(a_pipeline(), "acme_bare:Bare", labels="Optional")

    assert not bare.labelled
    assert LabelledPayloads(a_pipeline(), "acme_bare:Judged", labels="Optional").labelled, "it judges by itself"
    with pytest.raises(SamplesError, match="a sample has no right answer"):
        bare.score(None, {"y": np.array([1])})


def test_pickles_are_rejected(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], object))
    where = json_lines(tmp_path, {"inputs": {"x": "a.npy"}, "outputs": {"y": 1}})
    with pytest.raises(SamplesError, match="allow_pickle=False"):
        LabelledPayloads(a_pipeline(), where).payload(0)


def test_digest_depends_on_content_not_on_format(tmp_path: Path) -> None:
    for name in ("one", "two", "other"):
        (tmp_path / name).mkdir()
    np.save(tmp_path / "two" / "a.npy", np.array([1.0, 2.0]))
    one = json_lines(tmp_path / "one", {"inputs": {"x": [1, 2]}, "outputs": {"y": 1}})
    (tmp_path / "two" / "samples.csv").write_text("x,y\na.npy,1\n")
    other = json_lines(tmp_path / "other", {"inputs": {"x": [1, 2]}, "outputs": {"y": 2}})
    digests = [LabelledPayloads(a_pipeline(), where).digest() for where in (one, str(tmp_path / "two"), other)]
    assert digests[0] == digests[1] != digests[2]
    assert digests[0].startswith("sha256:")
