"""Placement benchmark: chats and their time to the first token, goodput, and bursts over calm."""

import json

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.harness.serving import HALVINGS
from benchmarks.papers.placement import (
    COLOCATED,
    DISAGGREGATED,
    carried_share,
    compare_rounds,
    first_seconds,
    pipeline_document,
    seconds_until_in_time,
)
from benchmarks.papers.placement_chats import (
    LAX,
    MAX_RPS,
    PATIENCE_SECONDS,
    ChatResult,
    ChatSender,
    ChatSlo,
    bursty_traffic,
    in_time_share,
    search_chat_rps,
)
from trimtab_loadtester.chat_client import ChatClient
from trimtab_loadtester.clients import OPEN
from trimtab_loadtester.multimodal.traffic import IMAGE_SHARE
from trimtab_pipelines.spec import InferencePipeline

TOKEN = b'data: {"choices": [{"delta": {"content": "12"}, "finish_reason": null}]}\n\n'
END = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


async def result_of(status, body):
    async def answer(_request):
        return web.Response(status=status, body=body)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server, ChatClient(f"127.0.0.1:{server.port}", "lmm", OPEN) as client:
        return await ChatSender(client).send(b"{}")


async def test_complete_stream_has_a_first_token():
    result = await result_of(200, TOKEN + END)

    assert result.complete
    assert first_seconds([result])[0] < PATIENCE_SECONDS


async def test_rejected_or_cut_chat_counts_as_the_longest_wait():
    rejected = await result_of(429, json.dumps({"error": {"message": "too many"}}).encode())
    cut = await result_of(200, TOKEN)

    assert (rejected.code, rejected.first_seconds) == ("429", np.inf)
    assert not cut.complete
    assert first_seconds([rejected, cut]).tolist() == [PATIENCE_SECONDS] * 2


@pytest.mark.parametrize("images", [0, 1, 16])
def test_chats_have_so_many_distinct_images(images):
    sender = ChatSender(ChatClient("", "lmm", OPEN))
    chats = [json.loads(chat) for chat in sender.make_chats(images, 2, seed=5)]
    urls = [
        part["image_url"]["url"]
        for body in chats
        for part in body["messages"][0]["content"]
        if part["type"] == "image_url"
    ]

    assert len(urls) == len(set(urls)) == 2 * images
    assert all(body["model"] == "lmm" and body["stream"] for body in chats)


def holding(rps):
    async def holds(tried):
        return tried <= rps

    return holds


@pytest.mark.parametrize("rps", [3.0, 10.0, 75.0, 390.0])
async def test_highest_rate_is_found_within_the_halvings(rps):
    goodput = await search_chat_rps(holding(rps))

    above = 8.0 * 2.0 ** max(np.ceil(np.log2(rps / 8.0)), 0)
    assert goodput <= rps < goodput + above / 2**HALVINGS


async def test_search_ends_without_a_rate_and_at_the_maximum():
    assert await search_chat_rps(holding(0.0)) == 0.0
    assert MAX_RPS / 2 < await search_chat_rps(holding(np.inf)) <= 2 * MAX_RPS


async def test_rate_that_failed_once_is_tried_again():
    tried = []

    async def holds(rps):
        tried.append(rps)
        return tried.count(rps) == 2 and rps < 20

    assert await search_chat_rps(holds) >= 16.0


def test_slo_has_a_target_of_the_first_and_the_next_tokens():
    slo = ChatSlo(0.03, 0.01)
    fast, late = (ChatResult(first_seconds=seconds) for seconds in (0.02, 0.05))
    slow = ChatResult(first_seconds=0.01, token_seconds=0.02)

    assert [result.meets(slo) for result in (fast, late, slow)] == [True, False, False]
    assert slow.meets(slo.times(2.0))
    assert (in_time_share([fast, late], slo), in_time_share([], slo)) == (0.5, 1.0)


def test_bursts_are_of_images_only_and_keep_the_mean():
    traffic = bursty_traffic(40.0)

    assert traffic.rps.mean() == pytest.approx(40.0)
    assert np.ptp(traffic.text_rps) == 0
    assert traffic.image_rps.mean() == pytest.approx(40.0 * IMAGE_SHARE)
    assert traffic.image_rps[traffic.bursts].min() == pytest.approx(5 * traffic.image_rps[~traffic.bursts].max())


def test_burst_ratio_has_a_confidence_interval_over_rounds():
    random = np.random.default_rng(1)
    drifts = np.linspace(1.0, 3.0, 12)
    calm = [drift * random.exponential(0.01, 105) for drift in drifts]
    slower = compare_rounds(calm, [1.3 * seconds for seconds in calm])
    same = compare_rounds(calm, [drift * random.exponential(0.01, 105) for drift in drifts])

    assert slower["over_calm"] == slower["over_calm_low"] == slower["over_calm_high"] == 1.3
    assert same["over_calm_low"] < 1.0 < same["over_calm_high"]
    assert same["over_calm_low"] < same["over_calm"] < same["over_calm_high"]


def test_too_few_chats_or_unequal_rounds_are_rejected():
    few = [np.full(30, 0.01)] * 10
    with pytest.raises(ValueError, match="at least 1000 chats; got 300"):
        compare_rounds(few, few)
    with pytest.raises(ValueError, match="got 10 in calm and 9 beside a burst"):
        compare_rounds(few, few[1:])


def test_recovery_ends_with_the_last_window_that_is_late():
    def ended(at, first):
        return ChatResult(first_seconds=first, ended_at=at)

    assert seconds_until_in_time([ended(100.0 + at, 0.1) for at in range(45)], 100.0) == 0.0
    assert seconds_until_in_time([ended(100.0 + at, 0.9 if at < 10 else 0.1) for at in range(45)], 100.0) == 14.0


async def test_no_sustained_fixed_placement_skips_the_planned_one():
    sender = ChatSender(ChatClient("", "lmm", OPEN))  # which cannot send

    assert await carried_share(sender, LAX, 1, 0.0) == 0.0


@pytest.mark.parametrize("architecture", ["decoder-only", "cross-attention"])
@pytest.mark.parametrize(
    ("placement", "stages"),
    [(COLOCATED, ["answer"]), (DISAGGREGATED, ["encode", "answer"]), (None, ["encode", "answer"])],
)
def test_placement_is_a_valid_pipeline_of_its_stages(architecture, placement, stages):
    document = pipeline_document(architecture, placement, LAX, "500m")
    pipeline = InferencePipeline.model_validate(document)

    assert [stage.name for stage in pipeline.spec.stages] == stages
    for stage in pipeline.spec.stages:
        assert stage.pin.replicas == (None if placement is None else placement[stage.name])
        assert max(stage.batch_sizes) == (16 if stage.name == "answer" else 8)
        assert all(architecture in variant.storage_uri for variant in stage.variants)
