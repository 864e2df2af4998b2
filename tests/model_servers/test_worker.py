"""The thread that computes: whatever a batch raises reaches whoever waits for it, and gives its place free."""

import asyncio

import pytest

from trimtab_model_servers.worker import BatchWorker


class EndedError(StopIteration):
    """A model's own."""


@pytest.mark.parametrize("error", [StopIteration("no more"), EndedError("no more"), KeyError("x")])
def test_what_a_batch_raises_is_told_and_its_place_is_free_again(error):
    def fail():
        raise error

    async def asked():
        worker = BatchWorker()
        with pytest.raises(Exception) as told:  # noqa: PT011  (whatever it is, it is looked at below)
            await asyncio.wait_for(worker.batch(fail), 5.0)
        await asyncio.wait_for(worker.drain(), 5.0)
        worker.close()
        return told.value

    found = asyncio.run(asked())
    assert error in (found, found.__cause__)
    assert not isinstance(found, StopIteration)
