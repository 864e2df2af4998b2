"""Speech recognition: samples FP32 [B, T] at 16 kHz, `audio_length` INT64 [B], to token ids INT64 [B, max_new_tokens].

Speech2Text generates with a decoder; wav2vec 2.0 classifies a letter every 20 ms and joins equal neighbors (CTC).
"""

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from trimtab_model_servers.families.filterbank import SAMPLES_PER_SECOND, WINDOW, mel_bands
from trimtab_model_servers.families.interfaces import Built, Parameters, read_parameters
from trimtab_model_servers.families.pretrained import architecture_of, build_model
from trimtab_model_servers.families.sequences import NO_TOKEN, pack, resize_width
from trimtab_model_servers.families.text import generated_tokens, generation_config
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

MAX_CLIPS = 4  # a second of audio takes 6.5 MB in each of wav2vec's first layers; more are no faster


class SpeechParameters(Parameters):
    """Settings of the family."""

    max_new_tokens: int = Field(default=128, ge=1, le=1000, description="Maximum tokens generated")
    max_seconds: float = Field(default=35.0, gt=0, le=60, description="Seconds of audio read; the rest is cut")
    beams: int = Field(default=1, ge=1, le=8, description="Beam search width; 1 is greedy; not for wav2vec2")


@dataclass(frozen=True, slots=True)
class Transcriber:
    """Speech2Text: mel bands to tokens.

    Its convolutions read some padding, so a clip's output depends slightly on the longest clip of its batch.
    """

    model: Any
    max_samples: int
    generation_config: Any

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint) -> dict[str, Tensor]:
        """Map `audio` [B, T] and `audio_length` [B] to `tokens` [B, max_new_tokens]."""
        del point  # a single operating point
        bands, mask = mel_bands(*pad_audio(inputs["audio"], inputs["audio_length"], self.max_samples))
        settings = self.generation_config
        output = self.model.generate(input_features=bands, attention_mask=mask, generation_config=settings)
        return {"tokens": generated_tokens(output, settings)}


@dataclass(frozen=True, slots=True)
class FrameReader:
    """wav2vec 2.0: raw samples to a letter per frame.

    The pretrained models have no attention mask and were trained on zero-padded clips, so a clip's output depends
    slightly on the longest clip of its batch.
    """

    model: Any
    max_samples: int
    max_new_tokens: int
    blank: int

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint) -> dict[str, Tensor]:
        """Map `audio` [B, T] and `audio_length` [B] to `tokens` [B, max_new_tokens]."""
        del point  # a single operating point
        audio, samples = pad_audio(inputs["audio"], inputs["audio_length"], self.max_samples)
        clips = torch.split(standardize(audio, samples), MAX_CLIPS)
        letters = torch.cat([self.model(some).logits.argmax(dim=-1) for some in clips])
        frames = self.model._get_feat_extract_output_lengths(samples)  # noqa: SLF001  (no public equivalent)
        letters = letters.masked_fill(torch.arange(letters.shape[1]) >= frames[:, None], self.blank)
        return {"tokens": resize_width(collapse_repeats(letters, self.blank), self.max_new_tokens)}


def pad_audio(audio: Tensor, samples: Tensor, max_samples: int) -> tuple[Tensor, Tensor]:
    """Cut a batch to its longest row, at least one window; zero the padding of each row."""
    samples = samples.clamp(min=WINDOW, max=min(max_samples, max(audio.shape[1], WINDOW)))
    width = int(samples.max())
    audio = torch.nn.functional.pad(audio, (0, max(0, width - audio.shape[1])))[:, :width]
    return audio.masked_fill(torch.arange(width) >= samples[:, None], 0.0), samples


def standardize(audio: Tensor, samples: Tensor) -> Tensor:
    """Scale each row [B, T] to mean 0 and deviation 1 over its samples [B]."""
    inside, count = torch.arange(audio.shape[1]) < samples[:, None], samples[:, None]
    centred = (audio - audio.sum(dim=1, keepdim=True) / count) * inside
    return centred / (centred.square().sum(dim=1, keepdim=True) / count + 1e-7).sqrt()


def collapse_repeats(letters: Tensor, blank: int) -> Tensor:
    """Join equal neighbors of [B, frames] and drop blanks (CTC)."""
    repeated = torch.zeros_like(letters, dtype=torch.bool)
    repeated[:, 1:] = letters[:, 1:] == letters[:, :-1]
    return pack(letters.masked_fill(repeated | (letters == blank), NO_TOKEN))


def build(spec: ModelSpec) -> Built:
    parameters = read_parameters(SpeechParameters, spec)
    model, random = build_model(spec)
    max_samples = round(parameters.max_seconds * SAMPLES_PER_SECOND)
    served: Transcriber | FrameReader
    if architecture_of(spec).task == "transcription":
        settings = generation_config(model, parameters.max_new_tokens, parameters.beams, random=random)
        served = Transcriber(model, max_samples, settings)
    else:
        served = FrameReader(model, max_samples, parameters.max_new_tokens, architecture_of(spec).padding)
    return Built.of(served, random=random)
