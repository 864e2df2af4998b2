"""Synthetic inputs: lengths of the published data sets, within the limits of their readers, and reproducible."""

import io
import wave

import numpy as np
import pytest

from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.synthetic_inputs import DISTRIBUTIONS, PAYLOADS_ANNOTATION, input_laws
from trimtab_pipelines.tensors import RequestInput

TOKENS = RequestInput(name="tokens", datatype="INT64", shape=(-1,))


def a_document(task: str, *variants: dict[str, object], payloads: str = "random") -> InferencePipeline:
    models = [
        {"name": f"v{n}", "family": f"hf/{task}", "storageUri": "m", "accuracy": 0.9, "parameters": parameters}
        for n, parameters in enumerate(variants or ({},))
    ]
    spec = {"slo": {"latency": "1s"}, "budget": {"cores": 2}, "stages": [{"name": "only", "variants": models}]}
    metadata = {"name": "p", "annotations": {PAYLOADS_ANNOTATION: payloads}}
    return InferencePipeline.model_validate({"metadata": metadata, "spec": spec})


def draw(pipeline: InferencePipeline, count: int = 60) -> dict[str, list[bytes]]:
    inputs = {spec.name: spec for spec in pipeline.spec.inputs}
    return {
        name: law.draw(inputs[name], count, 1, np.random.default_rng(1)).tolist()
        for name, law in input_laws(pipeline).items()
    }


def seconds(file: bytes) -> float:
    with wave.open(io.BytesIO(file)) as audio:
        return float(audio.getnframes() / audio.getframerate())


@pytest.mark.parametrize("law", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_lengths_have_the_published_mean(law):
    lengths = law.lengths(20_000, np.random.default_rng(1))

    assert lengths.min() >= law.least
    assert lengths.max() <= law.most
    assert law.mean * 0.7 < lengths.mean() < law.mean * 1.02
    assert np.log(lengths[lengths < law.most]).std() > 0.2


def test_values_fit_the_tightest_variant():
    texts = draw(a_document("text-classification", {"max_tokens": 20}, {"max_tokens": 40}))["text"]
    audio = draw(a_document("speech-recognition", {"max_seconds": 2}, {}))["audio"]
    asked = draw(a_document("question-answering", {"max_question_tokens": 8}))

    assert {len(text.split()) for text in texts} <= set(range(1, 10))
    assert max(map(seconds, audio)) <= 2
    assert max(len(text.split()) for text in asked["question"]) <= 3 < max(len(t.split()) for t in asked["context"])


def test_long_text_is_drawn_for_variants_that_cut_it():
    texts = draw(a_document("text-classification", {"max_tokens": 20, "truncate": True}))["text"]

    assert max(len(text.split()) for text in texts) > 20


def test_annotation_names_the_lengths():
    articles = draw(a_document("summarization", payloads="text=xsum-article"))["text"]

    assert np.mean([len(text.split()) for text in articles]) > 200


def test_tokens_are_padded_to_one_width():
    law = input_laws(a_document("translation"))["text"]
    rows = law.draw(TOKENS, 50, 1, np.random.default_rng(1))

    assert rows.shape == (50, 128)
    lengths = (rows >= 0).sum(axis=1)
    assert len(set(lengths)) > 10
    for row, length in zip(rows, lengths, strict=True):
        assert (row[:length] >= 1000).all()
        assert (row[length:] == -1).all()


def test_inputs_depend_on_the_seed_only():
    pipeline = a_document("image-classification")

    assert draw(pipeline, 2) == draw(pipeline, 2)


@pytest.mark.parametrize(
    ("task", "written", "message"),
    [
        ("summarization", "texts=xsum-article", "unknown input 'texts'"),
        ("summarization", "text=xsum", "unknown distribution 'xsum'"),
    ],
)
def test_invalid_payloads_are_rejected(task, written, message):
    with pytest.raises(ValueError, match=message):
        input_laws(a_document(task, payloads=written))
