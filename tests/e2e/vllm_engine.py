"""vLLM as `trimtab up` starts it. Its tests run if `vllm` is on the PATH."""

from pathlib import Path
from typing import Any

MODEL = "sample"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""One core computes, so that engine, router and client do not compete for it."""
ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Instead, for several engines: one thread each, on any core."""
WORDS = (Path(__file__).parents[2] / "docs" / "concepts.md").read_text(encoding="utf-8").split()
"""Of prompts."""


def container(vllm: str, model: Path, options: str, **environment: str) -> dict[str, Any]:
    """Container of an engine that serves the model of a folder."""
    serve = f"{options} --enforce-eager --enable-request-id-headers --host 127.0.0.1 --port $(PORT)"
    return {
        "engine": "vllm",
        "modelName": MODEL,
        "command": [vllm, "serve", str(model)],
        "args": [*serve.split(), "--served-model-name", MODEL],
        "env": ENVIRONMENT | environment,
    }
