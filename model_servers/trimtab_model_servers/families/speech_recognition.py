"""Speech recognition: samples FP32 [B, T] at 16 kHz, `audio_length` INT64 [B], to token ids INT64 [B, max_new_tokens].

Speech2Text writes with a decoder; wav2vec 2.0 names a letter for each 20 ms and joins equal neighbours (CTC).
"""

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from trimtab_model_servers.families.filterbank import SAMPLES_PER_SECOND, WINDOW, mel_bands
from trimtab_model_servers.families.interfaces import Built
from trimtab_model_servers.families.parameters import Parameters, read_parameters
from trimtab_model_servers.families.pretrained import architecture_of, build_model
from trimtab_model_servers.families.seq2seq import generation_config, text_of
from trimtab_model_servers.families.sequences import NO_TOKEN, packed, widened
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

CLIPS_AT_ONCE = 4  # a second of sound takes 6.5 MB in each of wav2vec's first layers; more at once are no faster


class SpeechParameters(Parameters):
    """Settings of the family."""

    max_new_tokens: int = Field(default=128, ge=1, le=1000, description="Tokens written at most")
    max_seconds: float = Field(default=35.0, gt=0, le=60, description="Sound heard; what is beyond is cut")
    beams: int = Field(default=1, ge=1, le=8, description="Drafts kept while writing; 1 is greedy; not for wav2vec2")


@dataclass(frozen=True, slots=True)
class Transcriber:
    """Speech2Text: mel bands in, written out token by token.

    Its convolutions see a little of what pads a clip: its numbers depend on the length of the longest one in its batch.
    """

    model: Any
    most_samples: int
    plan: Any

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint) -> dict[str, Tensor]:
        """Map `audio` [B, T] and `audio_length` [B] to `tokens` [B, max_new_tokens]."""
        del point  # one way to run
        bands, mask = mel_bands(*pad_audio(inputs["audio"], inputs["audio_length"], self.most_samples))
        written = self.model.generate(input_features=bands, attention_mask=mask, generation_config=self.plan)
        return {"tokens": text_of(written, self.plan)}


@dataclass(frozen=True, slots=True)
class FrameReader:
    """wav2vec 2.0: raw samples in, a letter a frame.

    The published models are trained without a mask, on clips padded with zeros: a clip's numbers depend a little on the
    length of the longest one in its batch.
    """

    model: Any
    most_samples: int
    max_new_tokens: int
    blank: int

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint) -> dict[str, Tensor]:
        """Map `audio` [B, T] and `audio_length` [B] to `tokens` [B, max_new_tokens]."""
        del point  # one way to run
        audio, samples = pad_audio(inputs["audio"], inputs["audio_length"], self.most_samples)
        clips = torch.split(standardised(audio, samples), CLIPS_AT_ONCE)
        letters = torch.cat([self.model(some).logits.argmax(dim=-1) for some in clips])
        frames = self.model._get_feat_extract_output_lengths(samples)  # noqa: SLF001  (it has no public name)
        letters = letters.masked_fill(torch.arange(letters.shape[1]) >= frames[:, None], self.blank)
        return {"tokens": widened(collapsed(letters, self.blank), self.max_new_tokens)}


def pad_audio(audio: Tensor, samples: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Cut a batch to its longest row, at least one window; silence what is beyond each row's own samples."""
    samples = samples.clamp(min=WINDOW, max=min(most, max(audio.shape[1], WINDOW)))
    width = int(samples.max())
    audio = torch.nn.functional.pad(audio, (0, max(0, width - audio.shape[1])))[:, :width]
    return audio.masked_fill(torch.arange(width) >= samples[:, None], 0.0), samples


def standardised(audio: Tensor, samples: Tensor) -> Tensor:
    """Give each row [B, T] mean 0 and deviation 1 over its own samples [B]."""
    inside, count = torch.arange(audio.shape[1]) < samples[:, None], samples[:, None]
    centred = (audio - audio.sum(dim=1, keepdim=True) / count) * inside
    return centred / (centred.square().sum(dim=1, keepdim=True) / count + 1e-7).sqrt()


def collapsed(letters: Tensor, blank: int) -> Tensor:
    """Join equal neighbours of [B, frames] and drop blanks."""
    repeated = torch.zeros_like(letters, dtype=torch.bool)
    repeated[:, 1:] = letters[:, 1:] == letters[:, :-1]
    return packed(letters.masked_fill(repeated | (letters == blank), NO_TOKEN))


def build(spec: ModelSpec) -> Built:
    """Build the model that the family's name ends in."""
    parameters = read_parameters(SpeechParameters, spec)
    model, random = build_model(spec)
    most_samples = round(parameters.max_seconds * SAMPLES_PER_SECOND)
    served: Transcriber | FrameReader
    if architecture_of(spec).task == "transcription":
        plan = generation_config(model, parameters.max_new_tokens, parameters.beams, random=random)
        served = Transcriber(model, most_samples, plan)
    else:
        served = FrameReader(model, most_samples, parameters.max_new_tokens, architecture_of(spec).padding)
    return Built(served, "random" if random else "stored")
