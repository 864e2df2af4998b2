"""A real engine, vLLM, behind the router and alone, with a small model that is made for the test.

It runs if `vllm` is on the PATH.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from tests.builders import a_variant
from tests.conformance.installed import run_script, system_program
from tests.conformance.target import Target
from tests.e2e.vllm_engine import ENVIRONMENT, MODEL, container
from tests.figures import Figures
from tests.local_run import Up
from tests.tiny_llama import chats_up, engines_up, write_model

pytestmark = pytest.mark.e2e

CONCURRENCY, REQUESTS, ROUNDS = 16, 200, 3
OPTIONS = f"--max-model-len 1024 --max-num-seqs {CONCURRENCY}"
OPTIONS += " --enable-auto-tool-choice --tool-call-parser hermes"
# Random weights would write spaces without end.
OPTIONS += ' --structured-outputs-config {"backend":"xgrammar","disable_any_whitespace":true}'
BENCH = "bench serve --backend openai-chat --endpoint /v1/chat/completions --dataset-name random --ignore-eos"
BENCH += f" --random-input-len 128 --random-output-len 32 --num-prompts {REQUESTS} --max-concurrency {CONCURRENCY}"
BENCH += " --percentile-metrics ttft,tpot --metric-percentiles 99 --save-result --disable-tqdm"


@dataclass(frozen=True)
class Served:
    """Addresses of an engine, and of the router in front of it."""

    vllm: str
    model: Path
    engine: str
    router: str
    pss_mib: float
    """Of the engine's processes."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    vllm, folder = system_program("vllm"), tmp_path_factory.mktemp("engines")
    model = folder / "model"
    write_model(model)
    with engines_up(folder, CONCURRENCY, container(vllm, model, OPTIONS)) as (local, (engine,)):
        yield Served(vllm, model, engine, local.url, pss_mib(local))


def pss_mib(local: Up) -> float:
    """Memory of the only replica's processes, with their shares of what they share."""
    replica = local.model_server("text")
    processes = (replica, *replica.children(recursive=True))
    return sum(process.memory_full_info().pss for process in processes) / 2**20


def bench(served: Served, url: str, file: Path) -> dict[str, float]:
    """Results of `vllm bench serve`; times in milliseconds."""
    command = [served.vllm, *BENCH.split(), "--base-url", url, "--model", MODEL, "--tokenizer", str(served.model)]
    command += ["--result-dir", str(file.parent), "--result-filename", file.name]
    environment = os.environ | ENVIRONMENT
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    results: dict[str, float] = json.loads(file.read_bytes())
    return results


def test_openai_client_gets_what_the_engine_has(served: Served) -> None:
    results = {
        url: run_script("engine_client.py", "openai", Target(url.removeprefix("http://"), "", MODEL))
        for url in (served.engine, served.router)
    }
    response, alone = results[served.router], results[served.engine]

    # Random weights end no call: the engine's parsers of streams and of whole responses read it differently.
    assert any(response.pop("tool"))
    assert any(alone.pop("tool"))
    assert response == alone
    assert response["text"] == response["streamed_text"]
    assert (response["streamed_tokens"], response["likely"], response["completions"]) == ([8], [2] * 8, 2)
    assert json.loads(response["object"])["sign"] in {"plus", "minus"}


def test_router_costs_an_engine_little(served: Served, figures: Figures, tmp_path: Path) -> None:
    """Both in turns, in one run."""
    runs: dict[str, list[dict[str, float]]] = {served.engine: [], served.router: []}
    for number in range(2 * ROUNDS):
        url = (served.engine, served.router)[number % 2]
        runs[url].append(bench(served, url, tmp_path / f"{number}.json"))

    def middle(url: str, figure: str) -> float:
        return median(result[figure] for result in runs[url])

    for figure in ("request_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms"):
        figures.add(**{f"alone_{figure}": middle(served.engine, figure), figure: middle(served.router, figure)})
    failed = sum(REQUESTS - result["completed"] for results in runs.values() for result in results)
    figures.require("failed", failed, "==", 0)

    def ratio(figure: str) -> float:
        return middle(served.router, figure) / middle(served.engine, figure)

    def more(figure: str) -> float:
        return middle(served.router, figure) - middle(served.engine, figure)

    require = figures.require
    require("throughput ratio", ratio("request_throughput"), ">=", 0.97, depends_on_load=True)
    require("more ms to first token, p50", more("median_ttft_ms"), "<=", 3.0, depends_on_load=True)
    require("more ms to first token, p99", more("p99_ttft_ms"), "<=", 10.0, depends_on_load=True)
    require("time per output token ratio", ratio("median_tpot_ms"), "<=", 1.03, depends_on_load=True)


def test_own_engine_answers_the_same_load(served: Served, figures: Figures, tmp_path: Path) -> None:
    """The same model on as many cores, behind the router, in turns with vLLM behind the router."""
    variant = a_variant(
        family="hf/text-generation",
        storageUri=str(served.model),
        resources={"cpu": "1"},
        parameters={"slots": CONCURRENCY, "slot_tokens": 1024, "dtype": "bfloat16"},
        maxBatchSize=CONCURRENCY,
    )
    with chats_up(tmp_path, CONCURRENCY, variant) as local:
        runs: dict[str, list[dict[str, float]]] = {served.router: [], local.url: []}
        for number in range(2 * ROUNDS):
            url = (served.router, local.url)[number % 2]
            runs[url].append(bench(served, url, tmp_path / f"{number}.json"))
        figures.add(vllm_pss_mib=served.pss_mib, own_pss_mib=pss_mib(local))

    for name, results in zip(("vllm", "own"), runs.values(), strict=True):
        for figure in ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms"):
            figures.add(**{f"{name}_{figure}": median(result[figure] for result in results)})
        figures.require(f"{name}: failed", sum(REQUESTS - result["completed"] for result in results), "==", 0)
