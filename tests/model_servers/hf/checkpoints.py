"""Miniature checkpoints: published architectures in the Hub's layout, with tokenizers trained on the docs."""

import io
import json
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import soundfile
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

hf: Any = import_module("transformers")  # by name: checking its types takes mypy minutes
ROOT = Path(__file__).parents[3]
VOCABULARY, WIDTH, MAX_TOKENS = 512, 32, 512
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")
SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@cache
def texts() -> tuple[str, ...]:
    pages = (page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    return tuple(line for page in pages for line in page.splitlines() if line.strip())


def tokenizer(pair: str = "<s> $A </s> </s> $B </s>") -> Any:
    """A byte-level BPE tokenizer like RoBERTa's and BART's."""
    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    raw.normalizer, raw.decoder = normalizers.NFC(), decoders.ByteLevel()
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator(texts(), trainer)
    ids = [(name, raw.token_to_id(name)) for name in ("<s>", "</s>")]
    raw.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair=pair, special_tokens=ids)
    names = dict(zip(("pad", "bos", "eos", "unk", "mask"), SPECIAL_TOKENS, strict=True))
    named = {f"{name}_token": token for name, token in names.items()} | {"cls_token": "<s>", "sep_token": "</s>"}
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        model_max_length=MAX_TOKENS,
        model_input_names=["input_ids", "attention_mask"],
        **named,
    )


def samples(files: Sequence[bytes]) -> list[Any]:
    """Samples of mono audio files, as transformers' pipelines take them."""
    return [soundfile.read(io.BytesIO(file), dtype="float32")[0] for file in files]


def save(folder: Path, model: Any, *processors_: Any) -> Path:
    """Write a model with random, but not tiny weights, so that answers differ between rows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    model.save_pretrained(folder)
    for each in processors_:
        each.save_pretrained(folder)
    return folder


def roberta(folder: Path, auto_class: str, labels: Sequence[str] = ("negative", "neutral", "positive")) -> Path:
    config = hf.RobertaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=MAX_TOKENS + 2,
        type_vocab_size=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
        **SMALL,
    )
    return save(folder, getattr(hf, auto_class).from_config(config), tokenizer())


def bart(folder: Path) -> Path:
    config = hf.BartConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=MAX_TOKENS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )
    model = hf.BartForConditionalGeneration(config)
    model.generation_config.max_new_tokens = 12
    model.generation_config.num_beams = 2
    return save(folder, model, tokenizer())


def wav2vec2(folder: Path, *, masked: bool = True) -> Path:
    """A CTC model of letters; with layer norm it masks padding, with group norm it does not."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = {
        letter: index for index, letter in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *"ETAONIHSRDLUMWCFGYPBVK"])
    }
    (folder / "vocab.json").write_text(json.dumps(letters))
    config = hf.Wav2Vec2Config(
        vocab_size=len(letters),
        conv_dim=(16, 16, 16),
        conv_stride=(5, 4, 4),
        conv_kernel=(10, 8, 4),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        feat_extract_norm="layer" if masked else "group",
        do_stable_layer_norm=masked,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **SMALL,
    )
    extractor = hf.Wav2Vec2FeatureExtractor(return_attention_mask=masked, do_normalize=True)
    return save(folder, hf.Wav2Vec2ForCTC(config), hf.Wav2Vec2CTCTokenizer(str(folder / "vocab.json")), extractor)


def moonshine(folder: Path) -> Path:
    """An encoder-decoder model of speech."""
    config = hf.MoonshineConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=64,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = hf.MoonshineForConditionalGeneration(config)
    model.generation_config.max_new_tokens = 8
    return save(folder, model, tokenizer(), hf.Wav2Vec2FeatureExtractor(return_attention_mask=True, do_normalize=False))


def vit(folder: Path, auto_class: str = "AutoModelForImageClassification") -> Path:
    labels = {"id2label": {0: "cat", 1: "dog", 2: "plane"}, "label2id": {"cat": 0, "dog": 1, "plane": 2}}
    model = getattr(hf, auto_class).from_config(hf.ViTConfig(image_size=32, patch_size=8, **labels, **SMALL))
    return save(folder, model, hf.ViTImageProcessor(size={"height": 32, "width": 32}))


def rt_detr(folder: Path) -> Path:
    backbone = hf.RTDetrResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = hf.RTDetrConfig(
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
        id2label={0: "person", 1: "car"},
        label2id={"person": 0, "car": 1},
    )
    model = hf.RTDetrForObjectDetection(config)
    return save(folder, model, hf.RTDetrImageProcessor(size={"height": 64, "width": 64}))


def clip(folder: Path) -> Path:
    config = hf.CLIPConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "max_position_embeddings": MAX_TOKENS,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **SMALL,
        },
        vision_config={"image_size": 32, "patch_size": 8, **SMALL},
        projection_dim=16,
    )
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    return save(folder, hf.CLIPModel(config), tokenizer(), hf.CLIPImageProcessor(**size))
