"""Payloads of digits-av: sizes, absent modalities, skew and scores."""

import json

import numpy as np
import pytest

from tests.builders import a_pipeline_document
from tests.training.digits_av.test_dataset import SPEAKERS, a_recording_file
from trimtab_loadtester.payloads.digits_av import DigitsAvPayloads, JobOptions
from trimtab_loadtester.payloads.interface import Score
from trimtab_loadtester.payloads.sources import payload_source
from trimtab_model_servers.families.digits_av import family
from trimtab_pipelines.spec import InferencePipeline


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
