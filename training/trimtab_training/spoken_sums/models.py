"""Architectures of the spoken-sums pipeline in their sizes: Parakeet with CTC over words, and BERT."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn

from trimtab_model_servers.families.transformers_package import TRANSFORMERS as HF
from trimtab_training.digits_av.formant_synthesis import RATE_HZ
from trimtab_training.spoken_sums.dataset import RESULTS, WORDS

SIZES: Final[Mapping[str, tuple[int, int, int]]] = {
    "transcribe-s": (16, 1, 8),
    "transcribe-m": (32, 1, 16),
    "transcribe-l": (144, 4, 40),
    "answer-xs": (32, 1, 4),
    "answer-s": (24, 2, 2),
    "answer-l": (64, 3, 4),
}
"""Width and layers, then channels of a transcriber's convolutions or attention heads of an answerer."""
TOKENIZERS: Final = {"transcribe": "ParakeetTokenizer", "answer": "PreTrainedTokenizerFast"}
_SPECIAL: Final = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>"}
MEL_BINS: Final = 40
SUBSAMPLING: Final = 8
FRAME_SAMPLES: Final = SUBSAMPLING * RATE_HZ // 100
"""Samples between two of a transcriber's frames."""
STRIDES: Final[Mapping[str, int]] = {"transcribe-s": 2}
"""One of so many spectra remains, 1 by default: computing them takes most of the lightest variant's time."""
FIRST_WORD: Final = len(_SPECIAL)
VOCABULARY: Final = FIRST_WORD + len(WORDS)


def word_tokenizer(kind: str) -> Any:
    """A tokenizer of the words of sums, with special tokens first."""
    vocabulary = {word: index for index, word in enumerate((*_SPECIAL.values(), *WORDS))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=_SPECIAL["unk_token"]))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    return getattr(HF, kind)(
        tokenizer_object=raw,
        model_max_length=16,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **_SPECIAL,
    )


def feature_extractor(stride: int = 1) -> Any:
    return HF.ParakeetFeatureExtractor(
        feature_size=MEL_BINS,
        sampling_rate=RATE_HZ,
        hop_length=stride * RATE_HZ // 100,
        n_fft=256,
        win_length=RATE_HZ // 40,
        return_attention_mask=True,
    )


def build(variant: str, seed: int) -> Any:
    """An untrained model of a variant, with PyTorch's initial weights: Transformers' are too small for these widths."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _with_small_weights(variant)
        for layer in model.modules():
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d):
                layer.reset_parameters()
    return model


def _with_small_weights(variant: str) -> Any:
    width, layers, third = SIZES[variant]
    if variant.startswith("answer"):
        labels = {index: str(index) for index in range(RESULTS)}
        config = HF.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=third,
            intermediate_size=2 * width,
            max_position_embeddings=16,
            type_vocab_size=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            id2label=labels,
            label2id={label: index for index, label in labels.items()},
        )
        return HF.BertForSequenceClassification(config)
    encoder = HF.ParakeetEncoderConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(2, width // 32),
        intermediate_size=3 * width,
        num_mel_bins=MEL_BINS,
        subsampling_conv_channels=third,
        subsampling_factor=SUBSAMPLING // STRIDES.get(variant, 1),
        max_position_embeddings=512,
        layerdrop=0.0,
        **dict.fromkeys(("dropout", "activation_dropout", "attention_dropout"), 0.05),
    )
    return HF.ParakeetForCTC(HF.ParakeetCTCConfig(vocab_size=VOCABULARY, pad_token_id=0, encoder_config=encoder))
