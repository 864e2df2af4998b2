"""Batch worker: an exception of a batch reaches its caller and frees its place."""

import asyncio
import threading
from functools import partial

import pytest

from trimtab_model_servers.batch_worker import BatchWorker


class EndedError(StopIteration):
    """A model's own."""


@pytest.mark.parametrize("error", [StopIteration("no more"), EndedError("no more"), KeyError("x")])
def test_failed_batch_raises_and_frees_its_place(error):
    def fail():
        raise error

    async def asked():
        worker = BatchWorker()
        with pytest.raises(Exception) as reported:  # noqa: PT011  (whatever it is, it is looked at below)
            await asyncio.wait_for(worker.run_batch(fail), 5.0)
        await asyncio.wait_for(worker.drain(), 5.0)
        worker.close()
        return reported.value

    found = asyncio.run(asked())
    assert error in (found, found.__cause__)
    assert not isinstance(found, StopIteration)


async def test_batches_wait_their_turn_up_to_the_maximum():
    worker, gate, begun = BatchWorker(max_waiting=2), threading.Event(), list[int]()

    def compute(number: int) -> None:
        begun.append(number)
        gate.wait(20)

    batches = [asyncio.create_task(worker.run_batch(partial(compute, number))) for number in range(4)]
    (excess,), _ = await asyncio.wait(batches, return_when=asyncio.FIRST_COMPLETED)
    while not begun:  # noqa: ASYNC110 - set by a thread
        await asyncio.sleep(0.001)
    batches[1].cancel()
    await asyncio.wait({batches[1]})
    assert begun == [0]
    gate.set()
    await asyncio.gather(batches[0], batches[2])
    worker.close()

    assert getattr(excess.exception(), "status_code", None) == 429
    assert begun == [0, 2], "an abandoned batch is not computed"
    assert batches[0].result()[1] == 0 < batches[2].result()[1], "seconds waited"


@pytest.mark.parametrize("ends", [lambda: "an answer", lambda: 1 / 0], ids=["it answers", "it fails"])
def test_closed_loop_does_not_end_the_worker_thread(ends):
    """The result is discarded; the thread continues with jobs of other loops."""
    worker, begun, closed = BatchWorker(), threading.Event(), threading.Event()

    def outlives_its_loop():
        begun.set()
        assert closed.wait(20)
        return ends()

    async def left():
        leaving = asyncio.create_task(worker.run(outlives_its_loop))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, 20)
        leaving.cancel()

    asyncio.run(left())
    closed.set()

    async def served():
        return await asyncio.wait_for(worker.run(lambda: "next"), 20)

    assert asyncio.run(served()) == "next"
    worker.close()
