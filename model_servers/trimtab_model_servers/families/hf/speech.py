"""Speech recognition: the text that is spoken in an audio file, by CTC or by an encoder-decoder model."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from pydantic import Field

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.families.hf.audio_files import MIN_SECONDS, decode_audio
from trimtab_model_servers.families.hf.checkpoint import Checkpoint, TaskParameters
from trimtab_model_servers.families.hf.payloads import encode_texts
from trimtab_model_servers.families.hf.task import Task, Tensors
from trimtab_model_servers.families.transformers_package import TRANSFORMERS
from trimtab_pipelines.families import MAX_SECONDS, RATE
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_protocol.tensors import Array


class SpeechParameters(TaskParameters):
    """Settings of speech recognition."""

    max_seconds: float = Field(default=MAX_SECONDS, ge=MIN_SECONDS, le=600, description="Longest audio file")


class SpeechRecognition(Task):
    """The text of each audio file, as transformers' pipeline of this task decodes it."""

    medium = "audio"
    example_size = 16_000
    parameters = SpeechParameters

    def __init__(self, checkpoint: Checkpoint, parameters: SpeechParameters) -> None:
        self._is_ctc = any(name.endswith("ForCTC") for name in checkpoint.config.architectures or ())
        self._scores = "score" in checkpoint.outputs
        if self._scores and not self._is_ctc:
            raise ModelError(f"{checkpoint.folder}: only CTC models have an output 'score'; remove it from the stage")
        self.auto_class = "AutoModelForCTC" if self._is_ctc else "AutoModelForSpeechSeq2Seq"
        super().__init__(checkpoint, parameters)
        self._extractor, self._tokenizer = checkpoint.feature_extractor(), checkpoint.tokenizer()
        self._max_seconds = parameters.max_seconds
        self._pipeline = TRANSFORMERS.AutomaticSpeechRecognitionPipeline(
            model=self.model, tokenizer=self._tokenizer, feature_extractor=self._extractor, device=-1
        )

    def limit(self, name: str) -> float:
        del name
        return self._max_seconds

    def move_to(self, device: torch.device) -> None:
        super().move_to(device)
        self._pipeline.device = device

    def infer(self, inputs: Tensors, point: OperatingPoint) -> Tensors:
        del point  # a single operating point
        rates_hz = inputs[RATE].tolist() if RATE in inputs else ()
        sounds = decode_audio("audio", inputs["audio"], self._extractor.sampling_rate, self._max_seconds, rates_hz)
        texts, scores = [""] * len(sounds), torch.zeros(len(sounds))
        for rows in self._batches(sounds):
            batch = [sounds[row] for row in rows]
            found = self._recognize_frames(batch) if self._is_ctc else [(text, 0.0) for text in self._generate(batch)]
            for row, (text, score) in zip(rows, found, strict=True):
                texts[row], scores[row] = text, score
        return {"text": encode_texts(texts)} | ({"score": scores} if self._scores else {})

    def _batches(self, sounds: Sequence[Array]) -> Iterable[list[int]]:
        """Rows that may be padded to one length: all if the model masks padding or always pads, else equally long ones.

        Encoder-decoder models of raw audio, such as Moonshine, normalize over time, so padding would change their text.
        """
        always_pads = hasattr(self._extractor, "n_samples")
        if always_pads or (self._is_ctc and self._extractor.return_attention_mask):
            return [list(range(len(sounds)))]
        groups: dict[int, list[int]] = {}
        for row, samples in enumerate(sounds):
            groups.setdefault(len(samples), []).append(row)
        return groups.values()

    def _generate(self, sounds: Sequence[Array]) -> list[str]:
        audio = [{"raw": samples, "sampling_rate": self._extractor.sampling_rate} for samples in sounds]
        return [answer["text"] for answer in self._pipeline(audio, batch_size=len(audio))]

    def _recognize_frames(self, sounds: Sequence[Array]) -> list[tuple[str, float]]:
        """Decode each row's own frames; the pipeline would decode padding too."""
        rate_hz = self._extractor.sampling_rate
        features = self._extractor(sounds, sampling_rate=rate_hz, padding=True, return_tensors="pt")
        logits = self.model(**features.to(self.model.device, self.model.dtype)).logits.float().cpu()
        frames = self._frame_counts(features, sounds)
        tokens = logits.argmax(dim=-1)
        texts = [self._tokenizer.decode(row[:count]) for row, count in zip(tokens, frames.tolist(), strict=True)]
        scores = text_probabilities(logits, frames, self.model.config.pad_token_id) if self._scores else frames
        return list(zip(texts, scores.tolist(), strict=True))

    def _frame_counts(self, features: Any, sounds: Sequence[Array]) -> torch.Tensor:
        """Frames of logits of each row; a model counts them from its own input, of spectra or of samples."""
        if "input_features" in features:
            lengths = features["attention_mask"].sum(dim=1).cpu()
        else:
            lengths = torch.tensor([len(samples) for samples in sounds])
        of_spectra = getattr(self.model, "_get_subsampling_output_length", None)
        count = of_spectra or self.model._get_feat_extract_output_lengths  # noqa: SLF001 - no public name
        return torch.as_tensor(count(lengths), dtype=torch.int64)


def text_probabilities(logits: torch.Tensor, frames: torch.Tensor, blank: int) -> torch.Tensor:
    """Probability [rows] of each row's text: that of its best path's tokens, over all of their alignments.

    Args:
        logits: [rows, frames, tokens].
        frames: frames of each row, [rows].
        blank: token of frames without a new token.
    """
    paths = [
        row[:count].unique_consecutive() for row, count in zip(logits.argmax(dim=-1), frames.tolist(), strict=True)
    ]
    tokens = [path[path != blank] for path in paths]
    losses = torch.nn.functional.ctc_loss(
        logits.log_softmax(dim=-1).transpose(0, 1),
        torch.cat(tokens),
        frames,
        torch.tensor([len(row) for row in tokens]),
        blank,
        reduction="none",
    )
    return (-losses).exp()
