"""`EngineKind`: what the router must know of a third-party server to speak with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

EngineName = Literal["vllm", "sglang", "tensorrt-llm", "transformers", "openai", "triton", "open-inference"]
OPEN_INFERENCE_READY = "/v2/health/ready"


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Protocol, readiness and request fields of one kind of server."""

    protocol: Literal["OpenInference", "OpenAI"] = "OpenAI"
    ready_path: str = "/health"
    salts_prefixes: bool = True
    """Whether it accepts `cache_salt`; a server with a closed list of fields rejects it."""
    max_tokens: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"


UNKNOWN_ENGINE: Final = EngineKind()
ENGINES: Final[Mapping[str, EngineKind]] = {
    "vllm": UNKNOWN_ENGINE,
    "sglang": UNKNOWN_ENGINE,
    "tensorrt-llm": UNKNOWN_ENGINE,
    "transformers": EngineKind(salts_prefixes=False),
    "openai": EngineKind(ready_path="/v1/models", salts_prefixes=False, max_tokens="max_completion_tokens"),
    "triton": EngineKind("OpenInference", OPEN_INFERENCE_READY),
    "open-inference": EngineKind("OpenInference", OPEN_INFERENCE_READY),
}
