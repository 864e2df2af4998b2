"""Eight images on two encoders: the first word where reading begins on those that are there, and where it waits.

One who writes, a model of InternVL's kind with random weights and 256 tokens an image, computes on a core of its own.
Two encoders wait instead of computing, as on accelerators of their own, for as long as makes both pools equally busy:
two encoders need as long for eight images as reading their prompt takes. Chats come one at a time, by turns of either
kind, to the same router and replicas. What waits for all shows, as its last image, one of a size that was not seen
before: that alone keeps a chat from beginning early, and it has as many tokens as all others.
"""

import asyncio
import base64
import io
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
import psutil
import torch
import yaml
from PIL import Image

from benchmarks.chats.paced import save
from benchmarks.chats.replica import Replica
from benchmarks.layouts.asking import Asker
from benchmarks.layouts.served import FOLDER
from benchmarks.router.processes import ENVIRONMENT, START_SECONDS, STOP_SECONDS, until_ready
from trimtab_model_servers.families.hf_vlm.configs import CONFIGS
from trimtab_model_servers.server.settings import write_model_folder
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.endpoints import Endpoints
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.processes.child_process import ChildProcess, ReplicaPorts, RouterPorts
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol import InferRequest, Tensor
from trimtab_protocol.chat.embedding_refs import EncodedImage, blank_image, dump_refs

FAMILY: Final = "internvl3-8b"
WIDTH, LAYERS, HEADS = 256, 4, 8
TOKENS, IMAGES, ENCODERS = 256, 8, 2
SIDE_PX, LEAST_NEW_PX = 128, 130
READS, ROUNDS = 9, 12
HOST: Final = "127.0.0.1"


def write_model(folder: Path) -> None:
    """Write who writes: as many tokens an image as is published, but few and narrow layers."""
    folder.mkdir(parents=True)
    shape = CONFIGS[FAMILY]("published")
    with torch.device("meta"):  # eight billion numbers that nobody needs
        config: Any = shape.model().config
    text, vision = config.text_config, config.vision_config
    text.hidden_size, text.intermediate_size, text.num_hidden_layers = WIDTH, 4 * WIDTH, LAYERS
    text.num_attention_heads = text.num_key_value_heads = HEADS
    text.layer_types = LAYERS * ["full_attention"]
    vision.hidden_size, vision.intermediate_size = 32, 32
    vision.num_hidden_layers, vision.num_attention_heads = 1, 2
    save(shape, config, folder)


@asynccontextmanager
async def starting(folder: Path) -> AsyncIterator[Any]:
    """What starts a module and reads its read_ready_line; all end with the block."""
    async with AsyncExitStack() as stack:

        async def start(module: str, ports: type[Any], *arguments: str) -> Any:
            process = await ChildProcess.start(module, arguments, folder / "log", module, environment=ENVIRONMENT)
            stack.push_async_callback(process.stop, STOP_SECONDS)
            return process.pid, await process.read_ready_line(ports, START_SECONDS)

        yield start


def a_pipeline(model: Path) -> InferencePipeline:
    """lmm-digits parted, with the other model."""
    source = yaml.safe_load((FOLDER / "disaggregated.yaml").read_text())
    spec = source["spec"]
    spec["slo"] = {"latency": "60s", "timeToFirstToken": "30s"}
    for stage in spec["stages"]:
        own = {"slots": 2, "slot_tokens": 2400} if stage.get("writes") else {}
        part = "text" if stage.get("writes") else "encode"
        stage["variants"] = [
            stage["variants"][0]
            | {"name": "internvl", "family": f"{FAMILY}/{part}", "storageUri": str(model), "parameters": own}
        ]
    return InferencePipeline.model_validate(source)


def a_plan(pipeline: InferencePipeline) -> PipelinePlan:
    """Two encoders that take an image at a time, and one who writes."""
    sizes = {"encode": (1, ENCODERS), "answer": (2, 1)}
    stages = [
        {"name": name, "variant": "internvl", "batchSize": size, "replicas": replicas, "accuracy": 1.0}
        for name, (size, replicas) in sizes.items()
    ]
    spec = {"pipeline": pipeline.name, "generation": 1, "createdAt": time.time(), "stages": stages}
    return PipelinePlan.model_validate({"metadata": {"name": pipeline.name}, "spec": spec})


def a_chat(model: str, sides_px: list[int], random: np.random.Generator) -> dict[str, Any]:
    """A chat about images of these sizes that nobody has shown before."""
    content: list[dict[str, Any]] = []
    for side in sides_px:
        file = io.BytesIO()
        Image.new("RGB", (side, side), tuple(random.integers(256, size=3).tolist())).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    content.append({"type": "text", "text": "What do they have in common?"})
    asked = {"model": model, "messages": [{"role": "user", "content": content}]}
    return asked | {"stream": True, "max_tokens": 2, "ignore_eos": True}


async def seconds_to_read(port: int, session: aiohttp.ClientSession, pid: int) -> float:
    """To the first word about eight images that are at hand: what reading such a prompt takes."""
    replica, seconds = Replica(psutil.Process(pid), port, session), []
    content = b'{"type":"image"},' * IMAGES + b'{"type":"text","text":"What do they have in common?"}'
    rows = {
        "messages": b'[{"role":"user","content":[%s]}]' % content,
        "references": dump_refs([blank_image(EncodedImage(rows=TOKENS))] * IMAGES),
        "options": b'{"max_tokens":1,"ignore_eos":true}',
    }
    tensors = tuple(Tensor(name, "BYTES", np.array([row], dtype=object)) for name, row in rows.items())
    for _ in range(READS):
        began, first = time.perf_counter(), 0.0
        async for _ in replica.events(InferRequest("internvl", tensors)):
            first = first or time.perf_counter() - began
        seconds.append(first)
    return statistics.median(seconds[1:])


async def first_words(folder: Path) -> dict[str, float]:
    """Both kinds by turns: seconds to the first word."""
    write_model(folder / "model")
    pipeline = a_pipeline(folder / "model")
    async with starting(folder) as start, aiohttp.ClientSession() as session:
        write_model_folder(pipeline, folder, "answer", ["internvl"], folder / "answer", 1.0)
        pid, writer = await start("trimtab_model_servers", ReplicaPorts, str(folder / "answer"))
        reading = await seconds_to_read(writer.data_port, session, pid)
        pace = reading * ENCODERS / IMAGES
        told = ["internvl", f"--tokens={TOKENS}", f"--width={WIDTH}", f"--seconds={pace}"]
        encoders = [await start("benchmarks.layouts.paced_encoder", ReplicaPorts, *told) for _ in range(ENCODERS)]
        ports = {"encode": [one.data_port for _, one in encoders], "answer": [writer.data_port]}
        stages = {
            stage: [
                {"name": f"{stage}-{number}", "address": f"{HOST}:{port}", "variants": ["internvl"]}
                for number, port in enumerate(listening)
            ]
            for stage, listening in ports.items()
        }
        write_json(folder / "pipeline.yaml", pipeline)
        write_json(folder / "plan.json", a_plan(pipeline))
        write_json(folder / "endpoints.json", Endpoints.model_validate({"generation": 1, "stages": stages}))
        files = [f"--{name}={folder / name}.json" for name in ("plan", "endpoints")]
        files.append("--no-proxy")
        _, router = await start("trimtab_router", RouterPorts, f"--pipeline={folder / 'pipeline.yaml'}", *files)
        await until_ready(router.admin_port)
        asker = Asker(router.rest_port, pipeline.name, session)
        return {"seconds_to_read_a_prompt": round(reading, 3), **await _by_turns(asker)}


async def _by_turns(asker: Asker) -> dict[str, float]:
    random = np.random.default_rng(97)
    await asker.ask(a_chat(asker.model, [SIDE_PX] * IMAGES, random))
    found: dict[str, list[float]] = {"ready_prefix": [], "waiting_for_all": []}
    for number in range(ROUNDS):
        kinds = {"ready_prefix": SIDE_PX, "waiting_for_all": LEAST_NEW_PX + number}
        for kind in kinds if number % 2 else reversed(kinds):
            told = await asker.ask(a_chat(asker.model, [SIDE_PX] * (IMAGES - 1) + [kinds[kind]], random))
            if told.first_seconds is None or not told.whole:
                raise RuntimeError(f"a chat was not answered: {told.status} {told.error}")
            found[kind].append(told.first_seconds)
    medians = {f"{kind}_first_word_seconds": statistics.median(seconds) for kind, seconds in found.items()}
    ready, waiting = medians.values()
    return {name: round(seconds, 3) for name, seconds in medians.items()} | {
        "ready_prefix_over_waiting": round(ready / waiting, 3)
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.stdout.write(f"{asyncio.run(first_words(Path(name)))}\n")
