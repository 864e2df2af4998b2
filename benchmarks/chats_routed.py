"""Benchmark of a router's overhead on fifty concurrent streams of chats.

One replica gets the same chats in turns at its own data port, and through its router, with and without Envoy. Clients
think for a while after each response, so that they do not fall into step with the model. They stand for other machines,
so they share the replica's core on every route: on the router's core they would take CPU time from it that they do not
take from a replica alone. Router and Envoy have the other core. The models are lmm-digits' decoder-only one, whose
fifty streams have thousands of tokens per second, and one with the pace of a large model on a GPU.
"""

import argparse
import asyncio
import json
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
import torch
from rich.progress import Progress

from benchmarks.harness.grid import Rounds, confidence_interval, p99
from benchmarks.harness.processors import CLIENT_CORE, SERVER_CORE, cpu_seconds, pin_threads
from benchmarks.harness.report import Report
from tests.local_run import chat_pipeline, chat_plan
from trimtab.local.supervisor import Setup, Supervisor
from trimtab.options import console
from trimtab_model_servers.families.hf_chat.chat_tokenizer import byte_tokenizer
from trimtab_model_servers.families.hf_chat.configs import CONFIGS
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.endpoints import Endpoints
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol import InferRequest, Tensor
from trimtab_protocol.chat.internal_wire import TENANTS, bytes_tensor, dump_tenants
from trimtab_protocol.rest import HEADER_LENGTH, encode_request
from trimtab_training.lmm_digits.questions import Chat, ChatSource

WEIGHTS: Final = Path("pipelines/lmm-digits/weights")
STREAMS: Final = 50
CLIENTS, THINK_SECONDS = 70, 0.25
"""With these about fifty responses are in progress."""
SLOTS, SLOT_TOKENS = 72, 400
SMALL, PACED = "small model", "large model's pace"
OUTPUT_TOKENS: Final = {SMALL: (50, 150), PACED: (20, 40)}
DIRECT, ROUTED, PROXIED = "alone", "routed", "behind Envoy"
PACED_NAME, PACED_WIDTH, PACED_LAYERS, PACED_HEADS = "llava-onevision-7b", 384, 3, 8
"""With these sizes a step takes tens of milliseconds on a CPU."""
_TEXT: Final = re.compile(rb'"(text|content)": ?"[^"]')
"""In an event with text; an incomplete character has none."""
MAX_ADDED_MS, MAX_ADDED_SHARE, MAX_ROUTER_MS = 2.0, 0.05, 1.0


@dataclass(slots=True)
class StreamMeasurements:
    """Measurements on one route."""

    first_seconds: list[float] = field(default_factory=list)
    """Times to first token."""
    round_ends: list[int] = field(default_factory=list)
    """Their number after each round."""
    streaming_seconds: float = 0.0
    """Of all responses together."""
    events: int = 0
    router_seconds: float = 0.0
    """CPU time of the router."""
    wall_seconds: float = 0.0
    empty: int = 0
    """Responses without text, such as streams with only an error."""

    def first_ms(self, quantile: float) -> float:
        """Return a quantile of the time to first token; infinity without any."""
        return round(1e3 * float(np.quantile(self.first_seconds, quantile)), 2) if self.first_seconds else inf

    @property
    def rounds(self) -> Rounds:
        return np.split(np.array(self.first_seconds), self.round_ends[:-1])

    @property
    def router_ms(self) -> float:
        """CPU milliseconds of the router per event; infinity without any."""
        return 1e3 * self.router_seconds / self.events if self.events else inf

    def figures(self, name: str) -> dict[str, float]:
        return {
            f"{name}: responses": len(self.first_seconds),
            f"{name}: responses without text": self.empty,
            f"{name}: first token p50 ms": self.first_ms(0.5),
            f"{name}: first token p99 ms": self.first_ms(0.99),
            f"{name}: responses in progress": round(self.streaming_seconds / self.wall_seconds, 1),
            f"{name}: events per second": round(self.events / self.wall_seconds),
        }


@dataclass(frozen=True, slots=True)
class Route:
    """URL and model that chats are sent to: a replica's own API (`direct`), or the OpenAI API."""

    url: str
    model: str
    session: aiohttp.ClientSession
    direct: bool
    output_tokens: tuple[int, int]

    def post(self, chat: Chat, max_tokens: int) -> Any:
        """Request a stream of so many tokens."""
        if self.direct:
            buffers, length = encode_request(request_of(chat, self.model, max_tokens=max_tokens, ignore_eos=True))
            return self.session.post(self.url, data=b"".join(buffers), headers={HEADER_LENGTH: str(length)})
        body = {"model": self.model, "messages": json.loads(chat.messages), "max_tokens": max_tokens}
        return self.session.post(self.url, json=body | {"ignore_eos": True, "stream": True})


def request_of(chat: Chat, model: str, **options: Any) -> InferRequest:
    """Inference request of a chat without images."""
    values = {"messages": chat.messages, "options": json.dumps(options).encode()}
    tensors = tuple(Tensor(name, "BYTES", bytes_tensor([value])) for name, value in values.items())
    return InferRequest(model, tensors, parameters={"binary_data_output": True, TENANTS: dump_tenants(["bench"])})


async def read_stream(
    route: Route, chat: Chat, max_tokens: int, measurements: StreamMeasurements, *, counts: bool
) -> None:
    """Send one chat and time its first token and its end."""
    began, first = time.perf_counter(), 0.0
    async with route.post(chat, max_tokens) as response:
        response.raise_for_status()
        async for chunk in response.content.iter_any():
            first = first or (time.perf_counter() if _TEXT.search(chunk) else 0.0)
            measurements.events += chunk.count(b"data: ")
    measurements.streaming_seconds += time.perf_counter() - began
    if not first:
        measurements.empty += 1
    elif counts:
        measurements.first_seconds.append(first - began)


async def run_round(route: Route, seconds: float, seed: int, measurements: StreamMeasurements, router: int) -> None:
    """Run the clients; first tokens of responses that began in the first quarter, all at once, do not count."""
    source, random = ChatSource(seed, pages=(0, 0)), np.random.default_rng(seed)
    began, cpu_before, numbers = time.perf_counter(), cpu_seconds(router), iter(range(10**9))

    async def run_client() -> None:
        while (elapsed := time.perf_counter() - began) < seconds:
            await asyncio.sleep(random.exponential(THINK_SECONDS))
            max_tokens = int(random.integers(*route.output_tokens, endpoint=True))
            await read_stream(route, source.chat(next(numbers)), max_tokens, measurements, counts=elapsed > seconds / 4)

    await asyncio.gather(*(run_client() for _ in range(CLIENTS)))
    measurements.router_seconds += cpu_seconds(router) - cpu_before
    measurements.wall_seconds += time.perf_counter() - began
    measurements.round_ends.append(len(measurements.first_seconds))


@asynccontextmanager
async def serve_model(model: str, *, proxy: bool) -> AsyncIterator[Supervisor]:
    """Serve a model by one replica on this process's core, behind a router on the other core."""
    with tempfile.TemporaryDirectory(prefix="trimtab-through-") as name:
        pipeline = _pipeline(model, Path(name) / "model")
        file = Path(name) / "pipeline.yaml"
        write_json(file, pipeline)
        async with Supervisor(Setup(file, Path(name) / "run", plan=chat_plan(pipeline), proxy=proxy)) as local:
            await local.ready()
            for pid in (*local.replica_manager.pids.values(), os.getpid()):
                pin_threads(pid, {SERVER_CORE})
            try:
                yield local
            finally:
                pin_threads(os.getpid(), {CLIENT_CORE})


def _pipeline(model: str, folder: Path) -> InferencePipeline:
    if model == PACED:
        write_paced_model(folder)
        options = {"weights": str(folder), "family": f"{PACED_NAME}/colocated", "size": "tiny"}
        return chat_pipeline(slots=SLOTS, slot_tokens=SLOT_TOKENS, **options)
    weights = str((WEIGHTS / "decoder-only.safetensors").resolve())
    return chat_pipeline(slots=SLOTS, slot_tokens=SLOT_TOKENS, weights=weights)


def write_paced_model(folder: Path) -> None:
    """Write random weights and a byte tokenizer in the publisher's layout; each token is a printable character."""
    shape = CONFIGS[PACED_NAME]("tiny")
    config: Any = shape.model().config
    text = config.text_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = PACED_WIDTH, 3 * PACED_WIDTH, PACED_LAYERS
    text.num_attention_heads = text.num_key_value_heads = PACED_HEADS
    text.layer_types = PACED_LAYERS * ["full_attention"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = shape.model_class(config)
    with torch.no_grad():
        model.lm_head.weight[: ord(" ")] = 0.0
        model.lm_head.weight[ord("~") :] = 0.0
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer(shape.image_id - 20)
    tokenizer.add_special_tokens(["<|im_end|>", "<|eot_id|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


async def compare_routes(
    model: str, name: str, rounds: int, seconds: float, progress: Progress
) -> dict[str, StreamMeasurements]:
    """Send chats to a replica directly and on another route, in turns."""
    measurements = {DIRECT: StreamMeasurements(), name: StreamMeasurements()}
    task = progress.add_task(f"{model}, {STREAMS} streams, {name}", total=2 * rounds)
    async with (
        serve_model(model, proxy=name == PROXIED) as local,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        endpoints = Endpoints.model_validate_json(local.replica_manager.site.endpoints_file.read_bytes())
        address, pipeline = endpoints.stages["text"][0].address, local.pipeline.name
        replica_url = f"http://{address}/v2/models/{pipeline}/generate_stream"
        router_url = f"http://127.0.0.1:{local.rest_port}/v1/chat/completions"
        routes = {
            DIRECT: Route(replica_url, pipeline, session, True, OUTPUT_TOKENS[model]),
            name: Route(router_url, pipeline, session, False, OUTPUT_TOKENS[model]),
        }
        if local.router is None:
            raise RuntimeError("the router has ended")
        for number in range(rounds):
            for route in (DIRECT, name) if number % 2 else (name, DIRECT):
                await run_round(routes[route], seconds, number, measurements[route], local.router.pid)
                progress.advance(task)
    return measurements


def judge(model: str, name: str, measurements: Mapping[str, StreamMeasurements], report: Report) -> None:
    """Add one comparison to the report; without responses on both routes nothing holds."""
    direct, other = measurements[DIRECT], measurements[name]
    report.add({f"{model}: {key}": value for key, value in direct.figures(f"{DIRECT}, beside {name}").items()})
    report.add({f"{model}: {key}": value for key, value in other.figures(name).items()})
    added_p50 = round(other.first_ms(0.5) - direct.first_ms(0.5), 2)
    report.add({f"{model}: {name}: added first token p50 ms": added_p50})
    for end, milliseconds in _added_p99_interval(direct.rounds, other.rounds).items():
        report.add({f"{model}: {name}: added first token p99 ms, {end}": milliseconds})
    responses = min(len(direct.first_seconds), len(other.first_seconds))
    added_p99 = round(other.first_ms(0.99) - direct.first_ms(0.99), 2)
    bound = round(max(direct.first_ms(0.99) * MAX_ADDED_SHARE, MAX_ADDED_MS), 2)
    label = f"{model}, {name}"
    report.hold(f"{label}: responses on either route", responses, ">=", 1)
    report.hold(f"{label}: responses without text", direct.empty + other.empty, "==", 0)
    report.hold(f"{label}: added first token p99 ms", added_p99, "<=", bound)
    report.hold(f"{label}: CPU ms of the router per event", round(other.router_ms, 4), "<=", MAX_ROUTER_MS)


def _added_p99_interval(direct: Rounds, other: Rounds) -> dict[str, float]:
    """Return the 90 % interval of the added p99; nothing if a round has no first token."""
    if len(direct) != len(other) or not all(map(len, (*direct, *other))):
        return {}
    low, high = confidence_interval(lambda sample: 1e3 * (p99(other, sample) - p99(direct, sample)), len(direct))
    return {"low": round(low, 2), "high": round(high, 2)}


async def measure(models: Sequence[str], rounds: int, seconds: float) -> Report:
    report = Report("chats-routed", {"streams": STREAMS})
    with Progress(console=console, transient=True) as progress:
        for model, name in product(models, (ROUTED, PROXIED)):
            judge(model, name, await compare_routes(model, name, rounds, seconds, progress), report)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks chats-routed", description=__doc__)
    parser.add_argument("--model", choices=(SMALL, PACED), action="append", help="only; repeatable")
    parser.add_argument("--rounds", type=int, default=12, help="on each route (default 12)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a round (default 6)")
    options = parser.parse_args()
    pin_threads(os.getpid(), {CLIENT_CORE})
    return asyncio.run(measure(options.model or (SMALL, PACED), options.rounds, options.seconds)).finish()
