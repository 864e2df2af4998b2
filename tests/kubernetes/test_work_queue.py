"""`WorkQueue`: deduplicated keys, one worker per key, and retries of failed keys."""

import asyncio
import time

from trimtab_kubernetes.work_queue import WorkQueue


async def test_key_is_deduplicated_and_handled_once() -> None:
    queue: WorkQueue[str] = WorkQueue(time.monotonic)
    handled: list[str] = []
    idle, entered = asyncio.Event(), 0

    async def handle(key: str) -> None:
        nonlocal entered
        entered += 1
        assert entered == 1
        handled.append(key)
        if len(handled) == 1:
            queue.add("a")  # asked for while in hand: looked at once more afterwards
            queue.add("a")
        await asyncio.sleep(0)
        entered -= 1
        if len(handled) == 2:
            idle.set()

    queue.add("a")
    queue.add("a")
    workers = [asyncio.create_task(queue.work(handle)) for _ in range(3)]
    await asyncio.wait_for(idle.wait(), 10)
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)

    assert handled == ["a", "a"]


async def test_failed_key_is_retried() -> None:
    queue: WorkQueue[str] = WorkQueue(time.monotonic)
    calls: list[float] = []
    done = asyncio.Event()

    async def handle(key: str) -> None:
        calls.append(time.monotonic())
        if len(calls) == 1:
            raise RuntimeError("not yet")
        done.set()

    queue.add("a")
    worker = asyncio.create_task(queue.work(handle))
    await asyncio.wait_for(done.wait(), 10)
    worker.cancel()
    await asyncio.gather(worker, return_exceptions=True)

    assert calls[1] - calls[0] >= 0.2
