"""KV slots: a prompt reuses the slot that mostly holds its prefix."""

import numpy as np

from trimtab_model_servers.engine.kv_slots import KvSlotManager, SlotLease


def keys(*runs: tuple[int, int]) -> np.ndarray:
    """Runs of (first, count)."""
    return np.concatenate([np.arange(first, first + count) for first, count in runs])


def served(table: KvSlotManager, prompt: np.ndarray, answer: int = 0) -> SlotLease:
    """Serve a request that generates ``answer`` tokens."""
    lease = table.acquire(prompt, "tenant")
    assert lease is not None
    table.record(lease.slot, prompt[lease.reused_tokens :])
    table.record(lease.slot, -np.arange(1, answer + 1))
    table.release(lease.slot)
    return lease


def test_shared_first_token_does_not_evict_the_other_prefix():
    table, one, other = KvSlotManager(3, 100), keys((0, 1), (10, 20)), keys((0, 1), (50, 20))
    for prompt in (one, other):
        served(table, prompt)

    assert [served(table, prompt).reused_tokens for prompt in (one, other, one, other)] == [20, 20, 20, 20]


def test_shared_instructions_are_copied_to_another_slot():
    table, begun = KvSlotManager(3, 200), keys((0, 20))
    one, other = np.concatenate([begun, keys((100, 40))]), np.concatenate([begun, keys((300, 40))])
    served(table, one)
    copied = served(table, other)
    went_on = served(table, np.concatenate([one, keys((500, 5))]))

    assert (copied.reused_tokens, copied.copy_from) == (20, 0)
    assert (went_on.slot, went_on.reused_tokens, went_on.copy_from) == (0, 60, None)


def test_repeated_prompt_reuses_its_slot():
    table, prompt = KvSlotManager(3, 100), keys((0, 30))
    leases = [served(table, prompt, answer=10) for _ in range(4)]

    assert [(lease.slot, lease.reused_tokens, lease.copy_from) for lease in leases[1:]] == [(0, 29, None)] * 3


def test_unrelated_prompt_gets_least_recently_released_slot():
    table = KvSlotManager(2, 100)
    slots = [served(table, keys((100 * n, 10))).slot for n in range(4)]

    assert slots == [0, 1, 0, 1]
    lease = table.acquire(keys((9000, 5)), "tenant")
    assert (lease.reused_tokens, lease.copy_from) == (0, None) if lease else False
