"""Miniature checkpoints that only tests need."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from trimtab_model_servers.families.hf.miniatures import (
    ENCODER,
    MAX_TOKENS,
    SEQ2SEQ,
    TOKENS,
    WIDTH,
    save,
    word_tokenizer,
)

hf: Any = import_module("transformers")  # by name: checking its types takes mypy minutes


def moonshine(folder: Path) -> Path:
    """An encoder-decoder model of speech."""
    config = hf.MoonshineConfig(
        **TOKENS,
        hidden_size=WIDTH,
        intermediate_size=64,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        decoder_start_token_id=1,
    )
    model = hf.MoonshineForConditionalGeneration(config)
    return save(
        folder, model, word_tokenizer(), hf.Wav2Vec2FeatureExtractor(return_attention_mask=True, do_normalize=False)
    )


def whisper(folder: Path) -> Path:
    """An encoder-decoder model of spectra, which pads every sound to 30 s."""
    model = json.loads(word_tokenizer().backend_tokenizer.to_str())["model"]
    merges, end = [tuple(pair) for pair in model["merges"]], "</s>"
    roles = dict.fromkeys(("pad_token", "bos_token", "eos_token", "unk_token"), end)
    tokenizer = hf.WhisperTokenizer(vocab=model["vocab"], merges=merges, **roles)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|startoftranscript|>", "<|notimestamps|>"]})
    start, untimed = len(tokenizer) - 2, len(tokenizer) - 1
    ids = {f"{role}_id": tokenizer.eos_token_id for role in roles if role != "unk_token"}
    sizes = SEQ2SEQ | ids | {"vocab_size": len(tokenizer), "decoder_start_token_id": start}
    network = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, num_mel_bins=16))
    network.generation_config.update(no_timestamps_token_id=untimed, is_multilingual=False)
    return save(folder, network, tokenizer, hf.WhisperFeatureExtractor(feature_size=16))


def parakeet(folder: Path) -> Path:
    """A CTC model of spectra: words, a frame of 80 ms."""
    encoder = hf.ParakeetEncoderConfig(**ENCODER, num_mel_bins=16, subsampling_conv_channels=8, layerdrop=0.0)
    config = hf.ParakeetCTCConfig(vocab_size=TOKENS["vocab_size"], pad_token_id=0, encoder_config=encoder)
    raw = word_tokenizer().backend_tokenizer
    tokenizer = hf.ParakeetTokenizer(tokenizer_object=raw, pad_token="<pad>", unk_token="<unk>")
    return save(folder, hf.ParakeetForCTC(config), tokenizer, hf.ParakeetFeatureExtractor(feature_size=16))


def clip(folder: Path) -> Path:
    config = hf.CLIPConfig(
        text_config={**TOKENS, "max_position_embeddings": MAX_TOKENS, **ENCODER},
        vision_config={"image_size": 32, "patch_size": 8, **ENCODER},
        projection_dim=16,
        logit_scale_init_value=0.0,
    )
    size = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    return save(folder, hf.CLIPModel(config), word_tokenizer(), hf.CLIPImageProcessor(**size))
