"""ModServe's printed figures (Qiu et al., SoCC 2025), and a profile that follows them.

The paper draws its latencies without their numbers. Printed are shares of the time to the first token of one image
(section 3.1): 79 % encoding for Llama 3.2 Vision 11B, 25 % for InternVL 2.5 26B. So the unit of time is that time,
alone on four GPUs; no conclusion depends on the unit.
"""

from dataclasses import dataclass
from typing import Final

from trimtab_loadtester.multimodal.traffic import IMAGE_SHARE, Request, Traffic, draw

STEPS: Final = {
    "decoupled": "−27 % and −42 % (Llama), −46 % and −47 % (InternVL) over the monolith",
    "+ scheduling": "−12 % and −25 % over decoupled",
    "+ routing": "−14 % and −32 % over + scheduling",
}
"""Section 5.2: mean and P99 of the time to the first token."""

MONOLITH_GPUS: Final = 4
TEXT_GPUS: Final = 4
IMAGE_GPUS: Final = 1
GPUS: Final = 128
MONOLITHS, TEXTS, IMAGES = 32, 20, 48
"""Replicas of 128 GPUs (section 5.2)."""
MEDIAN_TEXT_TOKENS: Final = 779
"""Of text requests in the paper's trace."""
IMAGE_PROMPT_TOKENS: Final = 100
"""Assumed, of text beside one image in what the paper profiles: ShareGPT-4o's questions are short (figure 4)."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds of one model, in units of its time to the first token for one image alone.

    Attributes:
        image_tokens: of one image of 896 x 896 pixels (table 1).
        preprocess: of an image, on CPU cores that are always free.
        encode: of an image on the four GPUs of a monolith.
        encode_alone: of an image on one GPU.
        prefill_base: of any request.
        prefill_token: of each token of the prompt; image tokens count for decoder-only models.
        prefill_image: of the cross-attention to one image.
        transfer: of one request's embeddings, RDMA (section 5.5: 5 ms, under 0.5 % of the time to the first token).
        throughput_gain: of ModServe over the monolith within the SLO, as printed (section 5.2).
        fewer_gpus: the share of GPUs that ModServe saves in hours with a burst, as printed (section 1).
    """

    name: str
    image_tokens: int
    preprocess: float
    encode: float
    encode_alone: float
    prefill_base: float
    prefill_token: float
    prefill_image: float
    throughput_gain: float
    fewer_gpus: float
    transfer: float = 0.005

    @property
    def decoder_only(self) -> bool:
        """Whether image tokens are part of the prompt."""
        return self.prefill_image == 0

    @property
    def kind(self) -> str:
        return "decoder-only" if self.decoder_only else "cross-attention"

    def prompt_tokens(self, text_tokens: int, images: int) -> int:
        return text_tokens + (images * self.image_tokens if self.decoder_only else 0)

    def prefill(self, text_tokens: int, images: int) -> float:
        tokens = self.prompt_tokens(text_tokens, images)
        return self.prefill_base + tokens * self.prefill_token + images * self.prefill_image

    def alone(self, text_tokens: int, images: int) -> float:
        """Return the seconds to the first token on an idle monolith."""
        return (self.preprocess if images else 0.0) + images * self.encode + self.prefill(text_tokens, images)


LLAMA: Final = Profile(
    name="Llama 3.2 Vision 11B (cross-attention)",
    image_tokens=6404,
    preprocess=0.05,
    encode=0.79,
    encode_alone=0.79 * 1.6,
    prefill_base=0.08,
    prefill_token=0.02 / IMAGE_PROMPT_TOKENS,
    prefill_image=0.06,
    throughput_gain=3.3,
    fewer_gpus=0.413,
)
INTERNVL: Final = Profile(
    name="InternVL 2.5 26B (decoder-only)",
    image_tokens=1280,
    preprocess=0.05,
    encode=0.25,
    encode_alone=0.25 * 2.5,
    prefill_base=0.04,
    prefill_token=0.66 / (1280 + IMAGE_PROMPT_TOKENS),
    prefill_image=0.0,
    throughput_gain=5.5,
    fewer_gpus=0.25,
    transfer=0.003,
)
MODELS: Final = (LLAMA, INTERNVL)
ASSUMED: Final = (
    "an encoder on one GPU takes 1.6 times as long as on four (630 M parameters: the paper finds four fastest, eight "
    "slower) or 2.5 times (6 B: eight are still 1.3 times faster than four), so that one GPU of four does 2.5 and 1.6 "
    "times as much; preprocessing 5 % of the time to the first token; 100 tokens of text beside the image that is "
    "profiled; in the load as much text as the trace's images leave of their contexts, and sixteen images in place of "
    "more, which one image request in eight has; decode takes nothing from prefill (the paper sees the same time "
    "between tokens in all); a monolith works on one request at a time, images first; a request's promise is twenty "
    "times what one of its kind (a median text, one image) takes alone: with ten, a monolith that does nothing else "
    "breaks it for more than one in a hundred, by sixteen images"
)

REQUESTS: Final = 8_000


def draw_mixture(rate: float, seed: int) -> list[Request]:
    """Draw requests at a steady rate, with the trace's images."""
    return draw(Traffic.steady(rate, REQUESTS / rate, IMAGE_SHARE), seed)
