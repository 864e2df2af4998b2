"""`EngineKind`: what the router must know of a third-party server to speak with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

EngineName = Literal["vllm", "sglang", "tensorrt-llm", "transformers", "openai", "triton", "open-inference"]
OPEN_INFERENCE_READY = "/v2/health/ready"


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """Names of the metrics by which a server reports its load; empty for one that it has not."""

    waiting: str
    running: str
    cache_usage: str
    preemptions: str = ""
    path: str = "/metrics"


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Protocol, readiness and request fields of one kind of server."""

    protocol: Literal["OpenInference", "OpenAI"] = "OpenAI"
    ready_path: str = "/health"
    salts_prefixes: bool = True
    """Whether it accepts `cache_salt`; a server with a closed list of fields rejects it."""
    max_tokens: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    processor_kwargs: bool = False
    """Whether it accepts `mm_processor_kwargs`: options of its image processor."""
    load: LoadMetrics | None = None
    drain_option: str = ""
    """Option without which the server cuts running responses when it is terminated; empty if it finishes them."""
    tokenize_path: str = ""
    """Path that counts the tokens of a chat without images; empty without one."""
    render_path: str = ""
    """Path that returns the tokens of a chat with its images, and generates nothing; empty without one."""


UNKNOWN_ENGINE: Final = EngineKind()
ENGINES: Final[Mapping[str, EngineKind]] = {
    "vllm": EngineKind(
        processor_kwargs=True,
        load=LoadMetrics(
            "vllm:num_requests_waiting",
            "vllm:num_requests_running",
            "vllm:kv_cache_usage_perc",
            "vllm:num_preemptions_total",
        ),
        drain_option="--shutdown-timeout",
        tokenize_path="/tokenize",
        render_path="/v1/chat/completions/render",
    ),
    "sglang": EngineKind(load=LoadMetrics("sglang:num_queue_reqs", "sglang:num_running_reqs", "sglang:token_usage")),
    "tensorrt-llm": EngineKind(
        load=LoadMetrics(
            "trtllm_num_requests_waiting",
            "trtllm_num_requests_running",
            "trtllm_kv_cache_utilization",
            path="/prometheus/metrics",
        )
    ),
    "transformers": EngineKind(salts_prefixes=False),
    "openai": EngineKind(ready_path="/v1/models", salts_prefixes=False, max_tokens="max_completion_tokens"),
    "triton": EngineKind("OpenInference", OPEN_INFERENCE_READY),
    "open-inference": EngineKind("OpenInference", OPEN_INFERENCE_READY),
}
