"""What a batch frees is there for the next: no page faults for it."""

import subprocess
import sys

import pytest

from trimtab_model_servers.allocation import keep_freed_memory

FAULTS = """
import resource, threading
import numpy as np
from trimtab_model_servers.allocation import keep_freed_memory

def batches():
    for _ in range(20):
        [np.ones(size, np.uint8) for size in (9_000_000, 5_000_000, 12_000_000, 2_000_000)]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=batches)
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
keep_freed_memory()
print(given_back, faults())
"""


@pytest.mark.skipif(not keep_freed_memory(), reason="the C library is another than GNU's")
def test_a_batch_takes_up_the_memory_of_the_one_before():
    told = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=60)
    given_back, kept = map(int, told.stdout.split())

    assert given_back > 8_000, "each batch had pages of its own"
    assert kept < given_back / 4
