"""Miniature checkpoints: published architectures in the Hub's layout, a few hundred kilobytes, with random weights.

They stand for a pipeline's checkpoints where there is no Hub: the same classes, files and processors, with tokenizers
trained on common words. Their answers have no meaning, but differ between rows.
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import ascii_letters, digits, punctuation
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from trimtab_model_servers.families.transformers_package import TRANSFORMERS as HF
from trimtab_model_servers.weights.files import CONFIG_FILE, SINGLE_FILE
from trimtab_pipelines.synthetic_inputs import WORDS

VOCABULARY, WIDTH, MAX_TOKENS, NEW_TOKENS = 512, 32, 512, 12
SPECIAL_TOKENS = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SEQ2SEQ = {
    "d_model": WIDTH,
    "decoder_start_token_id": 2,
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")},
}
LABELS: Mapping[str, Sequence[str]] = {
    "text-classification": ("negative", "neutral", "positive"),
    "token-classification": ("O", "B-PER", "I-PER", "B-LOC"),
    "question-answering": ("start", "end"),
    "object-detection": ("person", "car"),
}


def word_tokenizer() -> Any:
    """A byte-level BPE tokenizer with the special tokens of RoBERTa and BART."""
    raw = Tokenizer(models.BPE(unk_token="<unk>"))  # noqa: S106 - a token of text
    raw.decoder, raw.pre_tokenizer = decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), list(SPECIAL_TOKENS.values())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    raw.train_from_iterator([" ".join(WORDS)] * 2, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return HF.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        model_max_length=MAX_TOKENS,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{name}_token": token for name, token in {**SPECIAL_TOKENS, "cls": "<s>", "sep": "</s>"}.items()},
    )


def sentencepiece_tokenizer(folder: Path, kind: str, files: Sequence[str]) -> Any:
    """A tokenizer of Marian or Speech2Text: SentencePiece models, and a vocabulary in JSON."""
    import sentencepiece  # noqa: PLC0415 - needed by few checkpoints

    folder.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    letters = [f"{ascii_letters} {digits}", *punctuation]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*WORDS, " ".join(WORDS), *letters]),
        model_writer=model,
        vocab_size=VOCABULARY,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [processor.id_to_piece(index) for index in range(processor.get_piece_size())]
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    names = special + [piece for piece in pieces if piece not in special]
    for file in files:
        (folder / file).write_bytes(model.getvalue())
    vocabulary = folder / "vocab.json"
    vocabulary.write_text(json.dumps({name: index for index, name in enumerate(names)}))
    return getattr(HF, kind)(
        **dict(zip(_ARGUMENTS[kind], (str(vocabulary), *(str(folder / file) for file in files)), strict=True))
    )


_ARGUMENTS = {
    "MarianTokenizer": ("vocab", "source_spm", "target_spm"),
    "Speech2TextTokenizer": ("vocab_file", "spm_file"),
}


def randomize(model: torch.nn.Module, deviation: float = 0.3) -> None:
    """Draw weights that are not tiny, so that answers differ between rows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, deviation, generator=torch.Generator().manual_seed(parameter.numel()))


def save(folder: Path, model: Any, *processors_: Any) -> Path:
    """Write a model with random weights, and its tokenizer or processor."""
    randomize(model)
    if model.can_generate():
        special = [index for index in range(len(SPECIAL_TOKENS)) if index != TOKENS["eos_token_id"]]
        settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": 4, "num_beams": 2, "suppress_tokens": special}
        model.generation_config.update(**settings, forced_eos_token_id=None)
    model.save_pretrained(folder)
    for processor in processors_:
        processor.save_pretrained(folder)
    return folder


def labels(task: str) -> dict[str, Any]:
    names = LABELS.get(task)
    if names is None:
        return {}
    return {"id2label": dict(enumerate(names)), "label2id": {name: index for index, name in enumerate(names)}}


def encoder(kind: str, folder: Path, task: str) -> Path:
    """An encoder of text with the head of a task: BERT, DistilBERT, RoBERTa or XLM-RoBERTa."""
    sizes: dict[str, Any] = {**ENCODER, "max_position_embeddings": MAX_TOKENS + 2}
    if kind == "DistilBert":
        sizes = {"dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": MAX_TOKENS}
    config = getattr(HF, f"{kind}Config")(**TOKENS, **sizes, **labels(task))
    heads = {"text-embedding": "AutoModel", "question-answering": "AutoModelForQuestionAnswering"}
    heads |= {"token-classification": "AutoModelForTokenClassification"}
    model = getattr(HF, heads.get(task, "AutoModelForSequenceClassification")).from_config(config)
    return save(folder, model, word_tokenizer())


def bart(folder: Path) -> Path:
    config = HF.BartConfig(**TOKENS, **SEQ2SEQ, max_position_embeddings=MAX_TOKENS)
    return save(folder, HF.BartForConditionalGeneration(config), word_tokenizer())


def marian(folder: Path) -> Path:
    tokenizer = sentencepiece_tokenizer(folder, "MarianTokenizer", ("source.spm", "target.spm"))
    config = HF.MarianConfig(**TOKENS | {"vocab_size": len(tokenizer)}, **SEQ2SEQ, max_position_embeddings=MAX_TOKENS)
    return save(folder, HF.MarianMTModel(config), tokenizer)


def speech_to_text(folder: Path) -> Path:
    tokenizer = sentencepiece_tokenizer(folder, "Speech2TextTokenizer", ("sentencepiece.bpe.model",))
    config = HF.Speech2TextConfig(**TOKENS | {"vocab_size": len(tokenizer)}, **SEQ2SEQ, conv_channels=32)
    return save(folder, HF.Speech2TextForConditionalGeneration(config), tokenizer, HF.Speech2TextFeatureExtractor())


def wav2vec2(folder: Path, *, masked: bool = True) -> Path:
    """A CTC model of letters; with layer norm it masks padding, with group norm it does not."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ETAONIHSRDLUMWCFGYPBVK"]
    vocabulary = folder / "vocab.json"
    vocabulary.write_text(json.dumps({letter: index for index, letter in enumerate(letters)}))
    config = HF.Wav2Vec2Config(
        **TOKENS | {"vocab_size": len(letters)},
        **ENCODER,
        conv_dim=(16, 16, 16),
        conv_stride=(5, 4, 4),
        conv_kernel=(10, 8, 4),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        feat_extract_norm="layer" if masked else "group",
        do_stable_layer_norm=masked,
    )
    extractor = HF.Wav2Vec2FeatureExtractor(return_attention_mask=masked, do_normalize=True)
    return save(folder, HF.Wav2Vec2ForCTC(config), HF.Wav2Vec2CTCTokenizer(str(vocabulary)), extractor)


def rt_detr(folder: Path) -> Path:
    backbone = HF.RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = HF.RTDetrConfig(
        backbone_config=backbone,
        encoder_in_channels=[8, 16, 16],
        encoder_hidden_dim=WIDTH,
        encoder_ffn_dim=64,
        encoder_layers=1,
        encoder_attention_heads=4,
        decoder_in_channels=[WIDTH] * 3,
        d_model=WIDTH,
        num_queries=12,
        decoder_layers=1,
        decoder_ffn_dim=64,
        decoder_attention_heads=4,
        **labels("object-detection"),
    )
    processor = HF.RTDetrImageProcessor(size={"height": 64, "width": 64})
    return save(folder, HF.RTDetrForObjectDetection(config), processor)


def timm_resnet(folder: Path) -> Path:
    """A residual network in timm's layout."""
    given = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "interpolation": "bilinear"}
    config = {
        "architecture": "resnet18",
        "num_classes": 1000,
        "model_args": {"channels": [8, 16, 32, 64], "zero_init_last": False},
        "pretrained_cfg": {"input_size": [3, 64, 64], "crop_pct": 0.875, "num_classes": 1000, **given},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    model = HF.AutoModelForImageClassification.from_config(HF.AutoConfig.from_pretrained(folder))
    randomize(model.timm_model, 0.12)
    save_file(model.timm_model.state_dict(), folder / SINGLE_FILE, metadata={"format": "pt"})
    return folder


def vit(folder: Path, auto_class: str = "AutoModelForImageClassification") -> Path:
    names = {"id2label": {0: "cat", 1: "dog", 2: "plane"}, "label2id": {"cat": 0, "dog": 1, "plane": 2}}
    model = getattr(HF, auto_class).from_config(HF.ViTConfig(image_size=32, patch_size=8, **names, **ENCODER))
    return save(folder, model, HF.ViTImageProcessor(size={"height": 32, "width": 32}))


MAKERS: Sequence[tuple[str, Callable[[Path, str], Path]]] = (
    ("s2t", lambda folder, _: speech_to_text(folder)),
    ("hf/speech-", lambda folder, _: wav2vec2(folder)),
    ("hf/translation", lambda folder, _: marian(folder)),
    ("hf/summarization", lambda folder, _: bart(folder)),
    ("hf/object-", lambda folder, _: rt_detr(folder)),
    ("timm/", lambda folder, _: timm_resnet(folder)),
    ("hf/image-", lambda folder, _: vit(folder)),
    ("xlm-roberta", lambda folder, task: encoder("XLMRoberta", folder, task)),
    ("distilbert", lambda folder, task: encoder("DistilBert", folder, task)),
    ("roberta", lambda folder, task: encoder("Roberta", folder, task)),
    ("hf/te", lambda folder, task: encoder("Bert", folder, task)),
    ("hf/token-", lambda folder, task: encoder("Bert", folder, task)),
    ("hf/question-", lambda folder, task: encoder("Bert", folder, task)),
)
"""Makers by a part of the family's or the checkpoint's name; the first that matches."""


def write_miniature(family: str, storage_uri: str, folder: Path) -> bool:
    """Write a miniature of a variant's architecture, by its family's and checkpoint's names; False if none is known."""
    named = f"{family} {storage_uri}".lower()
    make = next((maker for part, maker in MAKERS if part in named), None)
    if make is not None:
        make(folder, family.removeprefix("hf/"))
    return make is not None
