"""Goodput is the highest rate that is carried; of words and images together, each kind by what it was promised."""

import numpy as np
import pytest

from benchmarks.layouts.asking import Told
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
async def test_the_highest_rate_is_found_as_closely_as_halvings_tell(rps):
    found = await highest(carrying(rps))

    above = 8.0 * 2.0 ** max(np.ceil(np.log2(rps / 8.0)), 0)
    assert found <= rps < found + above / 2**HALVINGS


async def test_what_is_never_carried_has_no_goodput_and_what_always_is_ends():
    assert await highest(carrying(0.0)) == 0.0
    assert MOST_RPS / 2 < await highest(carrying(np.inf)) <= 2 * MOST_RPS


async def test_a_rate_that_failed_once_is_tried_again():
    tried = []

    async def carried(rps):
        tried.append(rps)
        return tried.count(rps) == 2 and rps < 20

    assert await highest(carried) >= 16.0


def test_each_kind_is_judged_by_its_own_promise():
    told = [Told(whole=True, first_seconds=seconds) for seconds in (0.02, 0.05, 0.05, 0.2)]

    assert PROMISES.kept(told, [0, 0, 4, 4]) == {"words": 0.5, "images": 0.5}
    assert PROMISES.kept(told[:1], [0]) == {"words": 1.0, "images": 1.0}


def test_a_chat_that_goes_on_too_slowly_is_not_in_time():
    slow = Told(whole=True, first_seconds=0.01, last_seconds=0.05, pieces=3)

    assert PROMISES.kept([slow], [0])["words"] == 0.0


def test_bursts_are_of_images_alone_and_leave_the_mean_as_it_is():
    made = traffic(40.0)

    assert made.rps.mean() == pytest.approx(40.0)
    assert np.ptp(made.text_rps) == 0
    assert made.image_rps.mean() == pytest.approx(40.0 * IMAGE_SHARE)
    assert made.image_rps[made.bursts].min() == pytest.approx(5 * made.image_rps[~made.bursts].max())
