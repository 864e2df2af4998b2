"""`SolverPool`: the threads of decisions, a few for all pipelines and one per budget pool.

Decisions of one budget pool wait for each other; a thread of its own keeps them from delaying other pipelines.
"""

from collections.abc import Iterable
from concurrent.futures import Executor, ThreadPoolExecutor

from trimtab_pipelines.spec import InferencePipeline

SOLVERS = 2


class SolverPool:
    """All solver threads."""

    def __init__(self, pools: Iterable[str] = ()) -> None:
        self._shared = ThreadPoolExecutor(SOLVERS, thread_name_prefix="solve")
        self._pools = {name: ThreadPoolExecutor(1, thread_name_prefix=f"solve-{name}") for name in pools}

    def threads(self, pipeline: InferencePipeline) -> Executor:
        return self._pools.get(pipeline.spec.budget.pool or "", self._shared)

    def close(self) -> None:
        for threads in (self._shared, *self._pools.values()):
            threads.shutdown(wait=False, cancel_futures=True)
