"""Goodput: the highest rate that meets the SLOs, of text-only chats and of chats with images."""

import numpy as np
import pytest

from benchmarks.layouts.asking import ChatResult
from benchmarks.layouts.goodput import HALVINGS, MOST_RPS, highest
from benchmarks.layouts.mixed import traffic
from benchmarks.layouts.promised import Promises
from benchmarks.layouts.served import Promise
from trimtab_loadtester.multimodal.traffic import IMAGE_SHARE

PROMISES = Promises(Promise(0.03, 0.01), Promise(0.09, 0.01))


def carrying(rps):
    async def carried(tried):
        return tried <= rps

    return carried


@pytest.mark.parametrize("rps", [3.0, 10.0, 75.0, 390.0])
async def test_highest_rate_is_found_within_the_halvings(rps):
    found = await highest(carrying(rps))

    above = 8.0 * 2.0 ** max(np.ceil(np.log2(rps / 8.0)), 0)
    assert found <= rps < found + above / 2**HALVINGS


async def test_search_ends_without_a_rate_and_at_the_maximum():
    assert await highest(carrying(0.0)) == 0.0
    assert MOST_RPS / 2 < await highest(carrying(np.inf)) <= 2 * MOST_RPS


async def test_a_rate_that_failed_once_is_tried_again():
    tried = []

    async def carried(rps):
        tried.append(rps)
        return tried.count(rps) == 2 and rps < 20

    assert await highest(carried) >= 16.0


def test_each_kind_of_chat_has_its_own_slo():
    results = [ChatResult(whole=True, first_seconds=seconds) for seconds in (0.02, 0.05, 0.05, 0.2)]

    assert PROMISES.kept(results, [0, 0, 4, 4]) == {"words": 0.5, "images": 0.5}
    assert PROMISES.kept(results[:1], [0]) == {"words": 1.0, "images": 1.0}


def test_chat_with_slow_tokens_misses_its_slo():
    slow = ChatResult(whole=True, first_seconds=0.01, last_seconds=0.05, pieces=3)

    assert PROMISES.kept([slow], [0])["words"] == 0.0


def test_bursts_are_of_images_only_and_keep_the_mean():
    made = traffic(40.0)

    assert made.rps.mean() == pytest.approx(40.0)
    assert np.ptp(made.text_rps) == 0
    assert made.image_rps.mean() == pytest.approx(40.0 * IMAGE_SHARE)
    assert made.image_rps[made.bursts].min() == pytest.approx(5 * made.image_rps[~made.bursts].max())
