"""Router of one stage, with one replica."""

from collections.abc import AsyncIterator

import pytest

from tests.router.fakes import FakeReplica, Rig, a_pipeline, a_rig


@pytest.fixture
def replica() -> FakeReplica:
    return FakeReplica()


@pytest.fixture
async def rig(replica: FakeReplica) -> AsyncIterator[Rig]:
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}) as rig:
        yield rig
