"""Two models of different size on vLLM: profiled, planned, and switched under a load that doubles and halves."""

import asyncio
import json
import random
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.conformance.installed import system_program
from tests.e2e.vllm_engine import MODEL, ONE_THREAD, WORDS, container
from tests.figures import Figures
from tests.local_run import Up, trimtab, up
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.engines import a_served
from tests.tiny_llama import write_model
from trimtab_adapter.planning.latency import sustained_load_rps
from trimtab_loadtester.arrivals import poisson_arrivals
from trimtab_pipelines.documents import dump_yaml, load_profiles
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.processes.parent_death import command_tied_to_parent

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

CONCURRENCY = 8
LONG_ANSWER_TOKENS, MAX_TOKENS = 6000, 8192
OPTIONS = f"--max-model-len {MAX_TOKENS} --max-num-seqs {CONCURRENCY + 2}"
HORIZON_SECONDS, WARM_UP_SECONDS, SECONDS = 20.0, 10, 60
PREDICTED = 0.15
LOW_SECONDS, HIGH_SECONDS = 45, 120
LOW_RPS = 16.0
"""The larger model carries its busiest second, but not that of twice the load; its half is more than noise."""


@dataclass(frozen=True)
class Models:
    """Sizes of two models, and of their chats."""

    small: Mapping[str, int]
    large: Mapping[str, int]
    prompt_words: int
    answer_tokens: int

    def sample(self, seed: int) -> dict[str, Any]:
        options = {"max_tokens": self.answer_tokens, "ignore_eos": True}
        inputs = {"messages": json.dumps(a_prompt(seed, self.prompt_words)), "options": json.dumps(options)}
        return {"inputs": inputs, "outputs": {"text": ""}}


SLOW = Models(
    {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6},
    {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8},
    prompt_words=120,
    answer_tokens=32,
)
"""Their time is not that of router, proxy and client, which run on the same two cores."""
QUICK = Models(
    {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
    {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 5},
    prompt_words=60,
    answer_tokens=8,
)
"""They carry loads whose half is more than noise."""


def a_profile(folder: Path, models: Models, *options: str) -> Path:
    """Write a pipeline of two models, and profile it on chats."""
    vllm, variants = system_program("vllm"), []
    for name, accuracy in (("small", 0.7), ("large", 0.9)):
        write_model(folder / name, max_position_embeddings=MAX_TOKENS, **getattr(models, name))
        served = a_served(name, image="", **container(vllm, folder / name, OPTIONS, **ONE_THREAD))
        variants.append(served | {"accuracy": accuracy, "resources": {"cpu": "1"}, "maxBatchSize": CONCURRENCY})
    stage = a_writer(variants=variants, batchSizes=[1, 4, CONCURRENCY], maxReplicas=1)
    pipeline = a_chat_pipeline(
        [stage],
        slo={"latency": "300s", "timeToFirstToken": "3s", "quantile": 0.5},
        budget={"cores": "2"},
        objective={"goal": "MaxAccuracy"},
        adaptation={"interval": "10s", "horizon": f"{HORIZON_SECONDS:g}s", "forecaster": "Reactive"},
    )
    (folder / "pipeline.yaml").write_text(dump_yaml(pipeline))
    (folder / "chats").mkdir()
    (folder / "chats" / "samples.jsonl").write_text("".join(f"{json.dumps(models.sample(n))}\n" for n in range(512)))
    done = trimtab("profile", str(folder), "--samples", str(folder / "chats"), *options, timeout_seconds=900)
    assert done.code == 0, done.errors
    return folder


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_profile(tmp_path_factory.mktemp("slow"), SLOW)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_profile(tmp_path_factory.mktemp("quick"), QUICK, "--quick")


def a_prompt(seed: int, words: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": " ".join(random.Random(seed).choices(WORDS, k=words))}]


def capacities(folder: Path) -> dict[str, float]:
    """Chats a second of one replica of each variant, as profiled."""
    points = load_profiles(folder / "profile.yaml")["text"].spec.points
    return {point.variant: point.throughput_rps(CONCURRENCY) for point in points}


@dataclass
class Sent:
    """Chats that were sent to a router."""

    url: str
    session: aiohttp.ClientSession
    first_token_seconds: list[float] = field(default_factory=list)
    completed: int = 0

    async def chat(self, seed: int, tokens: int = SLOW.answer_tokens) -> tuple[str, int]:
        """Send one chat; returns its finish reason and the tokens that its usage counts."""
        body = {
            "model": MODEL,
            "messages": a_prompt(seed, SLOW.prompt_words),
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        body["stream_options"] = {"include_usage": True}
        began, is_first, reason, counted = time.perf_counter(), True, "", 0
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                assert "error" not in chunk, chunk
                if is_first and any(choice["delta"].get("content") for choice in chunk["choices"]):
                    self.first_token_seconds.append(time.perf_counter() - began)
                    is_first = False
                reason = next((choice["finish_reason"] or "" for choice in chunk["choices"]), reason)
                counted = (chunk.get("usage") or {}).get("completion_tokens", counted)
        self.completed += 1
        return reason, counted

    async def long_chat(self, after_seconds: float) -> tuple[str, int]:
        await asyncio.sleep(after_seconds)
        return await self.chat(0, LONG_ANSWER_TOKENS)


async def measured_throughput(sent: Sent, seconds: float) -> float:
    """Chats a second with as many at a time as a batch."""

    async def repeat(first: int) -> None:
        seed = first
        while time.perf_counter() < end:
            await sent.chat(seed)
            seed += CONCURRENCY

    began, before = time.perf_counter(), sent.completed
    end = began + seconds
    await asyncio.gather(*(repeat(n) for n in range(CONCURRENCY)))
    return (sent.completed - before) / (time.perf_counter() - began)


async def measured_first_tokens(sent: Sent, load_rps: float, seconds: int) -> np.ndarray[Any, Any]:
    """Seconds to first token of Poisson arrivals."""
    sent.first_token_seconds.clear()
    began, tasks = time.perf_counter(), []
    for number, due in enumerate(poisson_arrivals(np.full(seconds, load_rps), 0).tolist()):
        await asyncio.sleep(began + due - time.perf_counter())
        tasks.append(asyncio.create_task(sent.chat(1000 + number)))
    await asyncio.gather(*tasks)
    return np.array(sent.first_token_seconds)


@pytest.mark.parametrize("variant", ["small", "large"])
async def test_plan_predicts_what_is_served(variant: str, slow: Path, figures: Figures, tmp_path: Path) -> None:
    by_variant = capacities(slow)
    peak_rps = 0.6 * by_variant["large"] if variant == "large" else 0.4 * sum(by_variant.values())
    planned = trimtab("plan", str(slow), "--load", str(peak_rps), "-o", str(tmp_path / "plan.json"))
    assert planned.code == 0, planned.errors
    plan = PipelinePlan.model_validate_json((tmp_path / "plan.json").read_bytes())
    (stage,) = plan.spec.stages
    assert (stage.variant, stage.batch_size) == (variant, CONCURRENCY)

    arguments = ("--plan", str(tmp_path / "plan.json"))
    with up(tmp_path, *arguments, pipeline=slow / "pipeline.yaml") as local:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            sent = Sent(local.url, session)
            await measured_throughput(sent, WARM_UP_SECONDS)
            throughput_rps = await measured_throughput(sent, SECONDS / 2)
            load_rps = sustained_load_rps(peak_rps, HORIZON_SECONDS)
            first = await measured_first_tokens(sent, load_rps, SECONDS)

    figures.add(
        load_rps=load_rps,
        planned_rps=stage.throughput_rps,
        served_rps=throughput_rps,
        planned_first_token_seconds_p50=stage.latency_seconds,
        served_first_token_seconds_p50=float(np.median(first)),
        served_first_token_seconds_p99=float(np.quantile(first, 0.99)),
    )
    off = {
        "throughput": throughput_rps / stage.throughput_rps - 1.0,
        "first token, p50": float(np.median(first)) / stage.latency_seconds - 1.0,
    }
    for name, difference in off.items():
        figures.require(f"{name}: off the plan", abs(difference), "<=", PREDICTED, depends_on_load=True)


@contextmanager
def load_of(local: Up, folder: Path, out: Path, load: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Send a load; its results are in the folder `out`."""
    arguments = ["--load", load, "--protocol", "chat", "--samples", str(folder / "chats"), "-o", str(out)]
    arguments += ["--address", local.url.removeprefix("http://")]
    with (out / "load.log").open("wb") as log:
        command = command_tied_to_parent("trimtab", "loadtest", str(folder), *arguments)
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


async def test_models_change_with_the_load(quick: Path, figures: Figures, tmp_path: Path) -> None:
    steps = (LOW_RPS, LOW_SECONDS), (2 * LOW_RPS, HIGH_SECONDS), (LOW_RPS, HIGH_SECONDS)
    load = "steps:" + ",".join(f"{rps:g}x{seconds}" for rps, seconds in steps)
    with up(tmp_path, pipeline=quick / "pipeline.yaml") as local, load_of(local, quick, tmp_path, load) as sender:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            sent = Sent(local.url, session)
            # Each stream is under way when the load changes, and with it the model.
            starts = (LOW_SECONDS - 10, LOW_SECONDS + HIGH_SECONDS - 10)
            long = await asyncio.gather(*(sent.long_chat(after) for after in starts))
        await asyncio.to_thread(sender.wait)
        counters = local.counters()

    summary = json.loads((tmp_path / "load.json").read_bytes())["summary"]
    samples = map(json.loads, (tmp_path / "run" / "samples.jsonl").read_text().splitlines())
    variants = [name for name, _ in groupby(sample["stages"]["text"]["variant"] for sample in samples)]
    whole = [answer == ("length", LONG_ANSWER_TOKENS) for answer in long]
    figures.add(received=summary["received"], first_token_seconds_p99=summary["first_token_seconds_p99"])
    figures.add(dropped=summary["dropped"], late=summary["late"])
    figures.require("requests failed", counters["failed"], "==", 0)
    figures.require("long answers cut", whole.count(False), "==", 0)
    assert variants == ["large", "small", "large"]
