"""Freed memory is retained and reused without page faults."""

import subprocess
import sys

import pytest

from trimtab_pipelines.processes.malloc_tuning import retain_freed_memory

FAULTS = """
import resource
from trimtab_pipelines.processes.malloc_tuning import retain_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        [b"x" * size for size in (900_000, 500_000, 300_000)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
retain_freed_memory(2**20, 2**23)
print(given_back, faults())
"""


@pytest.mark.skipif(not retain_freed_memory(2**20, 2**23), reason="the C library is another than GNU's")
def test_freed_memory_is_reused():
    process = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=60)
    given_back, kept = map(int, process.stdout.split())

    assert given_back > 5_000, "each request had pages of its own"
    assert kept < given_back / 4
