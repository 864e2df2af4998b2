"""The same new image, shown by many callers at one instant to a pipeline of two encoders: how often it is encoded."""

import asyncio
import json
from typing import Any, Final

from benchmarks.layouts.asking import Asker, chats
from tests.local_run import Up

CALLERS: Final = 50
TIMES: Final = 20
CACHE_BYTES: Final = 64 * 2**20
"""As encoders have where nothing else is said."""
_ENCODED: Final = "trimtab_encoded_images_total{"


async def same_image(served: Up, asker: Asker) -> dict[str, float]:
    """Ask so often, each time about another image."""
    bodies = chats(asker.model, 1, TIMES, seed=98)
    before, answered = await encoded(served, asker), 0
    for body, answer in bodies:
        told = await asyncio.gather(*(asker.ask(body, answer) for _ in range(CALLERS)))
        answered += sum(one.whole for one in told)
    return {
        "same_image_callers": CALLERS,
        "same_image_answered_fraction": answered / (CALLERS * len(bodies)),
        "same_image_encodes_each": round((await encoded(served, asker) - before) / len(bodies), 3),
    }


async def encoded(served: Up, asker: Asker) -> float:
    """How many images all encoders have encoded, as they count them."""
    listed: dict[str, Any] = json.loads((served.folder / "endpoints.json").read_text())
    found = 0.0
    for replica in listed["stages"]["encode"]:
        async with asker.session.get(f"http://{replica['address']}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        found += sum(float(line.split()[-1]) for line in lines if line.startswith(_ENCODED))
    return found
