"""Architectures of IPA's language and speech models, defined here so that no configuration is downloaded.

Sizes, vocabularies and special tokens are those of the pretrained checkpoints (config.json); parameter counts equal
tables 9 to 14 of the paper. Other settings are the defaults of the transformers classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Task = Literal["classification", "question-answering", "generation", "transcription", "frames"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model class of transformers and its configuration."""

    task: Task
    """Determines the family module."""
    model: str
    config: str
    settings: Mapping[str, object]
    """Configuration, except the defaults of the class."""
    begin: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    """Special tokens between a question and its context."""
    end: tuple[int, ...] = ()
    padding: int = 1
    unknown: int = 3
    positions: int = 512
    """Maximum tokens of an input, special tokens included."""
    published: str = field(kw_only=True)
    """Hugging Face repository of matching weights."""

    @property
    def special_tokens(self) -> Mapping[str, Any]:
        """Special tokens of a text, as `sequences.model_inputs` takes them."""
        return {"begin": self.begin, "end": self.end, "unknown": self.unknown, "padding": self.padding}


_LARGE: dict[str, object] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
_ROBERTA: dict[str, object] = {
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
_XLM_ROBERTA = _ROBERTA | {"vocab_size": 250002}


def _bert(model: str, config: str, published: str) -> Architecture:
    settings = {"vocab_size": 30522}
    return Architecture("classification", model, config, settings, (101,), (102,), (102,), 0, 100, published=published)


def _roberta(task: Task, prefix: str, settings: Mapping[str, object], published: str) -> Architecture:
    head = "ForQuestionAnswering" if task == "question-answering" else "ForSequenceClassification"
    return Architecture(task, prefix + head, f"{prefix}Config", settings, (0,), (2, 2), (2,), published=published)


def _encoder_decoder(encoder_layers: int, decoder_layers: int, width: int, heads: int, inner: int) -> dict[str, object]:
    return {
        "encoder_layers": encoder_layers,
        "decoder_layers": decoder_layers,
        "d_model": width,
        "encoder_ffn_dim": inner,
        "decoder_ffn_dim": inner,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
    }


def _distilbart(encoder_layers: int, decoder_layers: int) -> Architecture:
    sizes = _encoder_decoder(encoder_layers, decoder_layers, 1024, 16, 4096)
    settings = sizes | {"vocab_size": 50264, "max_position_embeddings": 1024}
    return Architecture(
        "generation",
        "BartForConditionalGeneration",
        "BartConfig",
        settings,
        begin=(0,),
        end=(2,),
        positions=1024,
        published=f"sshleifer/distilbart-xsum-{encoder_layers}-{decoder_layers}",
    )


def _marian(vocabulary: int, end: int, width: int, positions: int, published: str) -> Architecture:
    settings = _encoder_decoder(6, 6, width, width // 64, 4 * width) | {
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "activation_function": "swish" if width == 512 else "relu",
        "scale_embedding": True,
        "pad_token_id": vocabulary - 1,
        "decoder_start_token_id": vocabulary - 1,
        "eos_token_id": end,
        "forced_eos_token_id": end,
    }
    return Architecture(
        "generation",
        "MarianMTModel",
        "MarianConfig",
        settings,
        end=(end,),
        padding=vocabulary - 1,
        unknown=1,
        positions=positions,
        published=published,
    )


def _speech_to_text(width: int, heads: int, inner: int, published: str) -> Architecture:
    settings = _encoder_decoder(12, 6, width, heads, inner) | {"vocab_size": 10000}
    model = "Speech2TextForConditionalGeneration"
    return Architecture("transcription", model, "Speech2TextConfig", settings, published=published)


def _wav2vec2(settings: Mapping[str, object], published: str) -> Architecture:
    config = {"vocab_size": 32, "feat_extract_norm": "group", "do_stable_layer_norm": False} | dict(settings)
    return Architecture("frames", "Wav2Vec2ForCTC", "Wav2Vec2Config", config, padding=0, published=published)


ARCHITECTURES: Mapping[str, Architecture] = {
    "distilbert-classifier": _bert(
        "DistilBertForSequenceClassification", "DistilBertConfig", "Souvikcmsa/SentimentAnalysisDistillBERT"
    ),
    "bert-base-classifier": _bert("BertForSequenceClassification", "BertConfig", "Souvikcmsa/BERT_sentiment_analysis"),
    "roberta-large-classifier": _roberta(
        "classification", "Roberta", _ROBERTA | _LARGE, "Souvikcmsa/Roberta_Sentiment_Analysis"
    ),
    "xlm-roberta-base-classifier": _roberta(
        "classification", "XLMRoberta", _XLM_ROBERTA, "dinalzein/xlm-roberta-base-finetuned-language-identification"
    ),
    "roberta-base-qa": _roberta("question-answering", "Roberta", _ROBERTA, "deepset/roberta-base-squad2"),
    "xlm-roberta-base-qa": _roberta(
        "question-answering", "XLMRoberta", _XLM_ROBERTA, "deepset/xlm-roberta-base-squad2"
    ),
    "xlm-roberta-large-qa": _roberta(
        "question-answering", "XLMRoberta", _XLM_ROBERTA | _LARGE, "deepset/xlm-roberta-large-squad2"
    ),
    **{
        f"distilbart-{encoder}-{decoder}": _distilbart(encoder, decoder)
        for encoder, decoder in ((1, 1), (12, 1), (6, 6), (12, 3), (9, 6), (12, 6))
    },
    "opus-mt": _marian(59514, 0, 512, 512, "Helsinki-NLP/opus-mt-fr-en"),
    "opus-mt-tc-big": _marian(53017, 43311, 1024, 1024, "Helsinki-NLP/opus-mt-tc-big-fr-en"),
    "s2t-small": _speech_to_text(256, 4, 2048, "facebook/s2t-small-librispeech-asr"),
    "s2t-medium": _speech_to_text(512, 8, 2048, "facebook/s2t-medium-librispeech-asr"),
    "s2t-large": _speech_to_text(1024, 16, 4096, "facebook/s2t-large-librispeech-asr"),
    "wav2vec2-base": _wav2vec2({}, "facebook/wav2vec2-base-960h"),
    "wav2vec2-large": _wav2vec2(_LARGE, "facebook/wav2vec2-large-960h"),
}
"""Architectures by the family's name after `transformers/`."""
