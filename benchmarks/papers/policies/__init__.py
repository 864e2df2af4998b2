"""Baseline scheduling policies of the papers, registered with the router's when this package is imported."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.papers.policies import baselines, mosel, otas
from trimtab_pipelines.scheduling_policies import MAX_SPLIT_ROWS, POLICY_MODULES
from trimtab_router.scheduling.policies import register

ROOT = Path(__file__).parents[3]

register("Mosel", mosel.POLICY, max_batch_rows=MAX_SPLIT_ROWS)
register("Aggressive", mosel.AGGRESSIVE, max_batch_rows=MAX_SPLIT_ROWS)
register("Random", mosel.RANDOM, max_batch_rows=MAX_SPLIT_ROWS)
register("AllModalities", baselines.ALL_MODALITIES)
register("Otas", otas.POLICY)
register("PetsLike", baselines.PETS)
register("InfaasLike", baselines.INFAAS)


@contextmanager
def policies_in_child_processes() -> Iterator[None]:
    """Let processes that are started meanwhile serve pipelines with these policies."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    before = {name: os.environ.get(name) for name in (POLICY_MODULES, "PYTHONPATH")}
    os.environ.update({POLICY_MODULES: __name__, "PYTHONPATH": path})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
