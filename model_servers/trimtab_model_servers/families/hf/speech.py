"""Speech recognition: the text that is spoken in an audio file, by CTC or by an encoder-decoder model."""

from collections.abc import Iterable, Sequence

import torch
from pydantic import Field

from trimtab_model_servers.families.hf.audio_files import MIN_SECONDS, decode_audio
from trimtab_model_servers.families.hf.checkpoint import Checkpoint, TaskParameters
from trimtab_model_servers.families.hf.payloads import encode_texts
from trimtab_model_servers.families.hf.task import Task, Tensors
from trimtab_model_servers.families.transformers_package import TRANSFORMERS
from trimtab_pipelines.families import MAX_SECONDS
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_protocol.tensors import Array


class SpeechParameters(TaskParameters):
    """Settings of speech recognition."""

    max_seconds: float = Field(default=MAX_SECONDS, ge=MIN_SECONDS, le=600, description="Longest audio file")


class SpeechRecognition(Task):
    """The text of each audio file, as transformers' pipeline of this task decodes it."""

    medium = "audio"
    parameters = SpeechParameters

    def __init__(self, checkpoint: Checkpoint, parameters: SpeechParameters) -> None:
        self._is_ctc = any(name.endswith("ForCTC") for name in checkpoint.config.architectures or ())
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
        sounds = decode_audio("audio", inputs["audio"], self._extractor.sampling_rate, self._max_seconds)
        texts = [""] * len(sounds)
        for rows in self._batches(sounds):
            recognize = self._recognize_frames if self._is_ctc else self._generate
            for row, text in zip(rows, recognize([sounds[row] for row in rows]), strict=True):
                texts[row] = text
        return {"text": encode_texts(texts)}

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

    def _recognize_frames(self, sounds: Sequence[Array]) -> list[str]:
        """Decode each row's own frames; the pipeline would decode padding too."""
        rate_hz = self._extractor.sampling_rate
        features = self._extractor(sounds, sampling_rate=rate_hz, padding=True, return_tensors="pt")
        output = self.model(**features.to(self.model.device, self.model.dtype))
        lengths = torch.tensor([len(samples) for samples in sounds])
        frames = self.model._get_feat_extract_output_lengths(lengths).tolist()  # noqa: SLF001 - no public name
        tokens = output.logits.argmax(dim=-1)
        return [self._tokenizer.decode(row[:count]) for row, count in zip(tokens, frames, strict=True)]
