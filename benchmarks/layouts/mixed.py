"""Goodput of words and images together, the images in bursts: most chats a second of which both kinds are in time.

Words and images are two processes, as in the traffic of a cluster: words at one rate, chats with images five times as
often in a burst as out of it, and 47 of 100 on average. Each kind is promised so many times what one of its kind takes
alone, served whole: who asks without images is not promised what images need. Of each kind 99 of 100 must be in time.
"""

from collections.abc import Awaitable
from typing import Any, Final

import numpy as np

from benchmarks.layouts.asking import Asker, chats
from benchmarks.layouts.goodput import LEAST_KEPT, highest
from benchmarks.layouts.promised import Promises
from trimtab_loadtester.multimodal.traffic import IMAGE_SHARE, Traffic, draw

BURST_OVER_CALM: Final = 5.0
"""Chats with images in a burst over those out of it: so many times the images of a minute as the trace's bursts."""
TURN_SECONDS, TURNS = 2.0, 4
"""Calm and burst take turns."""
POOL: Final = 96
Chat = tuple[dict[str, Any], str]
"""What is asked, and the right answer."""


async def mixed_goodput(asker: Asker, promises: Promises, images: int) -> float:
    """Of words and of chats that show so many images, together; requests a second."""
    pools = {shown: chats(asker.model, shown, POOL, seed=88 + shown) for shown in (0, images)}

    def carried(rps: float) -> Awaitable[bool]:
        return _carried(asker, promises, pools, images, rps)

    return await highest(carried)


async def _carried(asker: Asker, promises: Promises, pools: dict[int, list[Chat]], images: int, rps: float) -> bool:
    requests = draw(traffic(rps), seed=int(1000 * rps), images=images)
    shown = [request.images for request in requests]
    due = [(request.arrival_seconds, *pools[request.images][number % POOL]) for number, request in enumerate(requests)]
    kept = promises.kept(await asker.at_moments(due), shown)
    return min(kept.values()) >= LEAST_KEPT


def traffic(rps: float) -> Traffic:
    """Calm and burst by turns, so many chats a second on average."""
    burst = np.arange(TURNS) % 2 == 1
    times = np.where(burst, BURST_OVER_CALM, 1.0)
    image_rps = rps * IMAGE_SHARE * times / times.mean()
    return Traffic(np.full(TURNS, rps * (1 - IMAGE_SHARE)), image_rps, burst, TURN_SECONDS)
