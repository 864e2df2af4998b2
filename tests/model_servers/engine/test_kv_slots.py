"""Which slot a prompt gets: the one that mostly holds what it begins with, and nobody's else."""

import numpy as np

from trimtab_model_servers.engine.kv_slots import KvSlotManager, SlotLease


def keys(*runs: tuple[int, int]) -> np.ndarray:
    """Runs of (first, count)."""
    return np.concatenate([np.arange(first, first + count) for first, count in runs])


def served(table: KvSlotManager, prompt: np.ndarray, answer: int = 0) -> SlotLease:
    """A request from its slot to its end, with an answer of so many tokens."""
    lease = table.take(prompt, "tenant")
    assert lease is not None
    table.wrote(lease.slot, prompt[lease.reused :])
    table.wrote(lease.slot, -np.arange(1, answer + 1))
    table.free(lease.slot)
    return lease


def test_two_that_share_a_first_word_do_not_cost_each_other_the_rest():
    table, one, other = KvSlotManager(3, 100), keys((0, 1), (10, 20)), keys((0, 1), (50, 20))
    for prompt in (one, other):
        served(table, prompt)

    assert [served(table, prompt).reused for prompt in (one, other, one, other)] == [20, 20, 20, 20]


def test_chats_that_begin_with_the_same_instructions_keep_what_was_said():
    table, begun = KvSlotManager(3, 200), keys((0, 20))
    one, other = np.concatenate([begun, keys((100, 40))]), np.concatenate([begun, keys((300, 40))])
    served(table, one)
    copied = served(table, other)
    went_on = served(table, np.concatenate([one, keys((500, 5))]))

    assert (copied.reused, copied.source) == (20, 0)
    assert (went_on.slot, went_on.reused, went_on.source) == (0, 60, None)


def test_who_asks_again_takes_over_his_own_slot():
    table, prompt = KvSlotManager(3, 100), keys((0, 30))
    leases = [served(table, prompt, answer=10) for _ in range(4)]

    assert [(lease.slot, lease.reused, lease.source) for lease in leases[1:]] == [(0, 29, None)] * 3


def test_the_slot_that_was_left_longest_goes_where_nothing_is_in_common():
    table = KvSlotManager(2, 100)
    slots = [served(table, keys((100 * n, 10))).slot for n in range(4)]

    assert slots == [0, 1, 0, 1]
    lease = table.take(keys((9000, 5)), "tenant")
    assert (lease.reused, lease.source) == (0, None) if lease else False
