"""Conversations with two replicas of vLLM: through the router, through an Envoy that balances load, and with one."""

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp.test_utils import unused_port

from tests.conformance.installed import system_program
from tests.e2e.vllm_engine import MODEL, ONE_THREAD, WORDS, container
from tests.figures import Figures
from tests.local_run import Up, until
from tests.tiny_llama import engines_up, write_model
from trimtab_router.envoy import process as envoy

pytestmark = pytest.mark.e2e

CONVERSATIONS, TURNS, THINK_SECONDS = 8, 6, 3.0
SYSTEM_WORDS, USER_WORDS, ANSWER_TOKENS = 50, 180, 16
CONCURRENCY, ROUNDS = 16, 2
SIZES: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 1536,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
OPTIONS = f"--max-model-len 2048 --max-num-seqs {CONCURRENCY}"
_COUNTERS = re.compile(
    r"^vllm:(prefix_cache_hits|prefix_cache_queries|request_success)_total\{.*\} (\S+)$", re.MULTILINE
)


@dataclass(frozen=True)
class Served:
    """Addresses of two engines, of the router in front of them, and of an Envoy that balances load."""

    engines: Sequence[str]
    router: str
    balancer: str


@dataclass
class Load:
    """What one load measured."""

    first_token_seconds: list[float] = field(default_factory=list)
    hits: float = 0.0
    """Share of prompt tokens that engines found in their prefix caches."""
    largest_share: float = 0.0
    """Requests of the busiest engine, in means of all."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    vllm, folder = system_program("vllm"), tmp_path_factory.mktemp("prefixes")
    model = folder / "model"
    write_model(model, **SIZES)
    replica = container(vllm, model, OPTIONS, **ONE_THREAD)
    with engines_up(folder, CONCURRENCY, replica, replicas=2) as (local, engines):
        until(lambda: ready_replicas(local) == len(engines), "the router sends requests to all engines")
        with balancer_up(folder, engines) as balancer:
            yield Served(engines, local.url, balancer)


def ready_replicas(local: Up) -> float:
    (ready,) = re.findall(r"^trimtab_ready_replicas\{.*\} (\S+)$", local.metrics(), re.MULTILINE)
    return float(ready)


@contextmanager
def balancer_up(folder: Path, engines: Sequence[str]) -> Iterator[str]:
    """Run an Envoy that sends each request to the engine with the fewest requests; yields its URL."""
    port, kind = unused_port(), "type.googleapis.com/envoy.extensions.filters"
    addresses = [engine.removeprefix("http://").split(":") for engine in engines]
    endpoints = [{"endpoint": {"address": _address(host, int(number))}} for host, number in addresses]
    routes = [{"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}]
    manager = {
        "@type": f"{kind}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "engines",
        "route_config": {"virtual_hosts": [{"name": "engines", "domains": ["*"], "routes": routes}]},
        "http_filters": [{"name": "router", "typed_config": {"@type": f"{kind}.http.router.v3.Router"}}],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    cluster = {
        "name": "engines",
        "lb_policy": "LEAST_REQUEST",
        "load_assignment": {"cluster_name": "engines", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    listener = {"name": "engines", "address": _address("127.0.0.1", port), "filter_chains": [chain]}
    file = folder / "balancer.json"
    file.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}))
    process = subprocess.Popen(envoy.command(envoy.find_binary(), "--config-path", str(file)))
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


async def send_load(url: str, engines: Sequence[str], seed: int) -> Load:
    """Hold conversations side by side, and read what the engines count meanwhile."""
    load = Load()
    async with aiohttp.ClientSession() as session:
        before = [await read_counters(session, engine) for engine in engines]
        each = (converse(session, url, np.random.default_rng((seed, n)), load) for n in range(CONVERSATIONS))
        await asyncio.gather(*each)
        after = [await read_counters(session, engine) for engine in engines]
    counted = np.array(after) - np.array(before)
    hits, queries, requests = counted.T
    load.hits = float(hits.sum() / queries.sum())
    load.largest_share = float(requests.max() / requests.mean())
    assert requests.sum() == CONVERSATIONS * TURNS
    return load


async def converse(session: aiohttp.ClientSession, url: str, random: np.random.Generator, load: Load) -> None:
    """Hold one conversation; every turn repeats those before it."""
    messages = [{"role": "system", "content": words(random, SYSTEM_WORDS)}]
    for _ in range(TURNS):
        await asyncio.sleep(random.exponential(THINK_SECONDS))  # the reader thinks
        messages.append({"role": "user", "content": words(random, USER_WORDS)})
        chat = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "stream": True, "ignore_eos": True}
        began, text = time.perf_counter(), ""
        async with session.post(f"{url}/v1/chat/completions", json=chat) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    piece = "".join(c["delta"].get("content") or "" for c in json.loads(line[6:])["choices"])
                    if piece and not text:
                        load.first_token_seconds.append(time.perf_counter() - began)
                    text += piece
        messages.append({"role": "assistant", "content": text})


def words(random: np.random.Generator, count: int) -> str:
    return " ".join(random.choice(WORDS, count))


async def read_counters(session: aiohttp.ClientSession, engine: str) -> list[float]:
    """Return hit and queried tokens of the prefix cache, and requests."""
    async with session.get(f"{engine}/metrics") as response:
        found = _COUNTERS.findall(await response.text())
    names = ("prefix_cache_hits", "prefix_cache_queries", "request_success")
    return [sum(float(value) for name, value in found if name == wanted) for wanted in names]


async def test_conversations_find_their_prefix(served: Served, figures: Figures) -> None:
    loads: dict[str, list[Load]] = {served.router: [], served.balancer: []}
    for number in range(2 * ROUNDS):
        url = (served.router, served.balancer)[number % 2]
        loads[url].append(await send_load(url, served.engines, number))
    alone = await send_load(served.engines[0], served.engines[:1], 2 * ROUNDS)

    routed, balanced = loads.values()
    first = [float(np.median([s for load in each for s in load.first_token_seconds])) for each in (routed, balanced)]
    hits = [float(np.mean([load.hits for load in each])) for each in (routed, balanced)]
    largest = [max(load.largest_share for load in each) for each in (routed, balanced)]
    for name, *measured in zip(("routed", "balanced"), first, hits, largest, strict=True):
        names = ("first_token_seconds_p50", "prefix_hits", "largest_share")
        figures.add(**{f"{name}_{figure}": value for figure, value in zip(names, measured, strict=True)})
    figures.add(alone_first_token_seconds_p50=float(np.median(alone.first_token_seconds)), alone_prefix_hits=alone.hits)
    figures.require("prefix hits over one replica's", hits[0] / alone.hits, ">=", 0.9)
    figures.require("most requests of a replica over the mean", largest[0], "<=", 1.3)
    figures.require("first token over balanced load's, p50", first[0] / first[1], "<=", 0.75, depends_on_load=True)
