"""Pipelines that chat, in the cluster: asked over OpenAI's door for whole answers and streams, with pages."""

import base64
import json
from dataclasses import dataclass
from typing import Any, Final

import httpx

from benchmarks.cluster.observing import Watched, served, until
from benchmarks.cluster.setting import ROOT, CommandError, Setting, pipeline_document
from benchmarks.cluster.visiting import connection
from trimtab.local.router_client import Counters
from trimtab_pipelines.kubernetes_names import ROUTER_ADMIN_PORT, router_admin_name
from trimtab_training.lmm_digits.chat_samples import Chat, ChatSource

LAYOUTS: Final = {"whole": "pipeline.yaml", "parted": "disaggregated.yaml"}
"""One replica that sees and writes, or a pool of each: what is encoded goes from pod to pod."""
STAGE_CPU: Final = "500m"
SLOTS: Final = 8
CHATS: Final = 12
READY_SECONDS, SETTLED_SECONDS = 300.0, 10.0
PATIENT: Final = {"latency": "60s", "timeToFirstToken": "30s"}
"""What is looked at is what is answered, not when: the machine may be busy."""


@dataclass(frozen=True, slots=True)
class Chatted:
    """What came of a layout: answers, whole and streamed, that were not right, and requests that no sum has."""

    answers: int
    wrong: int
    unaccounted: int
    ready_seconds: float


async def chatted(setting: Setting, layout: str) -> Chatted:
    """Serve lmm-digits with one of its models and one batch size a stage, ask it, and take it away."""
    document = pipeline_document(ROOT / "pipelines" / "lmm-digits" / LAYOUTS[layout], setting.namespace)
    for stage in document["spec"]["stages"]:
        stage |= {"variants": stage["variants"][:1], "batchSizes": [SLOTS]}
        stage["variants"][0]["resources"] |= {"cpu": STAGE_CPU}
    document["spec"] |= {"slo": PATIENT, "budget": {"cores": "1"}}
    source = ChatSource()
    async with served(setting, document, READY_SECONDS) as (watched, ready_seconds):
        told = [(chat.answer, await answers(watched, chat)) for chat in map(source.chat, range(CHATS))]
        counters = await until(lambda: _settled(watched), "the sums of all chats", SETTLED_SECONDS)
    wrong = sum(answer != right for right, both in told for answer in both)
    return Chatted(2 * len(told), wrong, counters.received - counters.outcomes["ok"], ready_seconds)


async def answers(watched: Watched, chat: Chat) -> tuple[str, str]:
    """What is said, whole and in parts."""
    headers = {"authorization": f"Bearer {watched.setting.credentials.keys['load']}"}
    url, asked = f"https://{watched.address}/v1/chat/completions", _asked(watched.name, chat)
    async with connection(watched) as client:
        whole = await client.post(url, json=asked, headers=headers)
        parts = await client.post(url, json=asked | {"stream": True}, headers=headers)
    for answer in (whole, parts):
        if answer.is_error:
            raise CommandError(f"a chat was answered with {answer.status_code}: {answer.text}")
    return whole.json()["choices"][0]["message"]["content"], _joined(parts)


def _joined(parts: httpx.Response) -> str:
    """The words of a stream that has come to its end; the error where there is one."""
    lines = [line.removeprefix("data: ") for line in parts.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines[:-1]]
    if lines[-1] != "[DONE]":
        return f"no end: {lines[-1]}"
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


def _asked(model: str, chat: Chat) -> dict[str, Any]:
    """A chat as OpenAI's clients write it."""
    messages, images = json.loads(chat.messages), iter(chat.images)
    for part in (part for message in messages for part in message["content"] if part["type"] == "image"):
        url = "data:image/png;base64," + base64.b64encode(next(images)).decode()
        part |= {"type": "image_url", "image_url": {"url": url}}
    return {"model": model, "messages": messages}


async def _settled(watched: Watched) -> Counters | None:
    address = await watched.setting.address(
        watched.setting.namespace, router_admin_name(watched.name), ROUTER_ADMIN_PORT
    )
    counters = Counters.parse((await watched.client.get(f"http://{address}/metrics")).text)
    return counters if counters.received >= 2 * CHATS and counters.received == sum(counters.outcomes.values()) else None
