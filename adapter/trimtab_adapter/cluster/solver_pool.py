"""The threads in which decisions are made: a few for all pipelines, one for each pool.

Decisions of one pool wait for each other. In threads of their own they keep nobody else waiting.
"""

from collections.abc import Iterable
from concurrent.futures import Executor, ThreadPoolExecutor

from trimtab_pipelines.spec import InferencePipeline

SOLVERS = 2


class SolverPool:
    """All threads that solve."""

    def __init__(self, pools: Iterable[str] = ()) -> None:
        self._shared = ThreadPoolExecutor(SOLVERS, thread_name_prefix="solve")
        self._pools = {name: ThreadPoolExecutor(1, thread_name_prefix=f"solve-{name}") for name in pools}

    def threads(self, pipeline: InferencePipeline) -> Executor:
        """Where to decide for a pipeline."""
        return self._pools.get(pipeline.spec.budget.pool or "", self._shared)

    def close(self) -> None:
        """Begin no decision any more."""
        for threads in (self._shared, *self._pools.values()):
            threads.shutdown(wait=False, cancel_futures=True)
