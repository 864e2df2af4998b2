"""Families on transformers: independent rows, stored and random weights."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from tests.model_servers.test_model_adapters import a_spec
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.architectures import ARCHITECTURES, Architecture
from trimtab_model_servers.families.pretrained import construct, load
from trimtab_model_servers.families.text import (
    QuestionAnswerer,
    Seq2SeqNetwork,
    TextClassifier,
    best_spans,
    generation_config,
)
from trimtab_model_servers.server.hosted_model import load_model
from trimtab_pipelines.operating_point import OperatingPoint

POINT = OperatingPoint(accuracy=0.5)
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
SMALL_BART = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "init_std": 0.5,
}


def a_small(name: str, **settings: object) -> Architecture:
    """An architecture as published, but for its width and depth."""
    whole = ARCHITECTURES[name]
    return replace(whole, settings=dict(whole.settings) | {"vocab_size": 200} | settings)


def tokens(*rows: list[int], width: int = 12) -> torch.Tensor:
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows])


def run(network, **inputs):
    with torch.inference_mode():
        return network.infer(inputs, POINT)


@pytest.fixture(scope="module")
def classifier() -> TextClassifier:
    torch.manual_seed(1)
    architecture = a_small("bert-base-classifier", **SMALL)
    return TextClassifier(construct(architecture, num_labels=3, initializer_range=0.5), architecture, max_tokens=8)


@pytest.fixture(scope="module")
def answerer() -> QuestionAnswerer:
    torch.manual_seed(2)
    architecture = a_small("roberta-base-qa", **SMALL)
    return QuestionAnswerer(construct(architecture, initializer_range=0.5), architecture, 96, max_answer_tokens=3)


@pytest.fixture(scope="module")
def writer() -> Seq2SeqNetwork:
    torch.manual_seed(3)
    architecture = a_small("distilbart-1-1", **SMALL_BART)
    model = construct(architecture)
    return Seq2SeqNetwork(model, architecture, 64, generation_config(model, 6, 1, random=True))


def test_classifier_equals_its_model(classifier):
    answer = run(classifier, tokens=tokens([7, 8, 9]))
    with torch.inference_mode():
        right = classifier.model(torch.tensor([[101, 7, 8, 9, 102]])).logits.softmax(-1)

    assert answer["label"].tolist() == right.argmax(-1).tolist()
    assert answer["confidence"].item() == pytest.approx(right.max().item(), rel=1e-5)


def test_long_text_is_cut_and_unknown_ids_are_replaced(classifier):
    long = run(classifier, tokens=tokens([7, 8, 9, 10, 11, 12, 13, 14]))
    cut = run(classifier, tokens=tokens([7, 8, 9, 10, 11, 12]))
    unknown = run(classifier, tokens=tokens([7, 199_999]))

    assert long["confidence"].item() == pytest.approx(cut["confidence"].item())
    assert unknown["confidence"].item() == pytest.approx(run(classifier, tokens=tokens([7, 100]))["confidence"].item())


def test_empty_text_has_a_label(classifier):
    assert run(classifier, tokens=tokens([], []))["label"].shape == (2,)


@pytest.mark.parametrize("family", ["classifier", "answerer", "writer"])
def test_output_does_not_depend_on_rows_or_padding(family, request):
    network = request.getfixturevalue(family)
    first, second = [7, 8, 9, 10, 11], [5, 6]

    def ask(*rows, width):
        texts = tokens(*rows, width=width)
        if family == "answerer":
            return run(network, question=texts.flip(0), context=texts)
        return run(network, tokens=texts)

    together = ask(first, second, width=40)
    apart = ask(second, first, width=9)
    for name, rows in together.items():
        assert torch.allclose(rows[[1, 0]].float(), apart[name].float(), atol=1e-5), name


def test_span_lies_within_the_context(answerer):
    context = tokens([7, 8, 9, 10, 11], [12], [])
    answer = run(answerer, question=tokens([5], [6, 7, 8], [9]), context=context)

    for start, end, length in zip(answer["start"].tolist(), answer["end"].tolist(), [5, 1, 0], strict=True):
        assert (start, end) == (-1, -1) if not length else 0 <= start <= end < min(length, start + 3)
    assert answer["score"][2] == 0
    assert (answer["score"][:2] > 0).all()


def test_best_span_is_optimal():
    torch.manual_seed(4)
    starts, ends, first = torch.randn(20, 9), torch.randn(20, 9), torch.randint(0, 3, (20,))
    found = best_spans(starts, ends, first, max_tokens=4)
    for row in range(20):
        score, start, end = max(
            (float(starts[row, i] + ends[row, j]), i, j) for i in range(9) for j in range(i, min(i + 4, 9))
        )
        assert found["start"][row] == start - first[row]
        assert found["end"][row] == end - first[row]
        assert found["score"][row].log().item() == pytest.approx(score, abs=1e-4)


def test_random_seq2seq_generates_the_maximum(writer):
    written = run(writer, tokens=tokens([7, 8, 9], [5]))["tokens"]

    assert written.shape == (2, 6)
    assert written.dtype == torch.int64
    assert (written[:, :-1] >= 0).all()


def test_seq2seq_is_greedy(writer):
    written = run(writer, tokens=tokens([7, 8, 9]))["tokens"][0].tolist()
    drafted = [2]
    with torch.inference_mode():
        for _ in written:
            logits = writer.model(
                input_ids=torch.tensor([[0, 7, 8, 9, 2]]), decoder_input_ids=torch.tensor([drafted])
            ).logits[0, -1]
            logits[2] = -torch.inf  # not to end before it must
            drafted.append(int(logits.argmax()))
    special = {0, 1, 2}

    assert [token for token in written if token >= 0] == [token for token in drafted[1:] if token not in special]


def test_stored_weights_equal_saved_model(tmp_path, writer):
    writer.model.save_pretrained(tmp_path)
    model = load(writer.architecture, tmp_path / "model.safetensors", {})

    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in writer.model.state_dict().items())
    assert not model.training


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.pop("classifier.bias"),
            "'classifier.bias' is missing; are these weights like Souvikcmsa/",
        ),
        (lambda state: state.update(extra=torch.zeros(1)), "'extra' is not part of BertForSequenceClassification"),
        (
            lambda state: state.update({"classifier.weight": torch.zeros(4, 32)}),
            r"'classifier.weight' has shape \[4, 32\]; with weights like .* it must be \[3, 32\]",
        ),
    ],
)
def test_weights_of_another_architecture_are_rejected(tmp_path, classifier, change, message):
    state = {name: tensor.clone() for name, tensor in classifier.model.state_dict().items()}
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        load(classifier.architecture, tmp_path / "model.safetensors", {"num_labels": 3})


@pytest.mark.parametrize(
    ("family", "parameters", "message"),
    [
        ("distilbert-classifier", {"label": 3}, "parameters.label: Extra inputs .*; there are: labels, max_tokens"),
        ("roberta-base-qa", {"max_tokens": 5000}, "parameters.max_tokens: Input should be less than or equal to 512"),
    ],
)
def test_unknown_parameter_is_rejected(family, parameters, message):
    with pytest.raises(ModelError, match=f"family 'transformers/{family}': {message}"):
        load_model(a_spec(family=f"transformers/{family}", parameters=parameters))
