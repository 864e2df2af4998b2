"""Scheduler and KV slots: slot assignment, reused prefixes, token budget of a step; without a model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_model_servers.engine.kv_slots import KvSlotManager, SlotLease
from trimtab_model_servers.engine.request import EngineBusy, Image, Request, RequestError, position_keys
from trimtab_model_servers.engine.scheduler import TEXT_ONLY_MEMORY_STEPS, EngineLimits, Scheduler, Step

LIMITS = EngineLimits(slots=3, slot_tokens=40, step_tokens=8, max_waiting=50)


def a_request(name: str, prompt: int = 10, new: int = 5, **fields) -> Request:
    return Request(name, tuple(100 * len(name) + place for place in range(prompt)), max_new_tokens=new, **fields)


def planned(scheduler: Scheduler) -> Step:
    step = scheduler.next_step()
    assert step is not None
    return step


def computed(scheduler: Scheduler, step: Step) -> list[str]:
    """Report a step as computed; return the requests that got a token."""
    for chunk in step.chunks:
        scheduler.record_computed(chunk)
        if chunk.samples:
            scheduler.record_token(chunk.request_id, 1)
    return [chunk.request_id for chunk in step.chunks if chunk.samples]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10), st.integers(0, 5)), min_size=1, max_size=12))
def test_requests_complete_within_step_tokens_and_slots(drawn):
    scheduler, left = Scheduler(LIMITS), {}
    for number, (prompt, new, urgency) in enumerate(drawn):
        request = Request(f"r{number}", tuple(range(number, number + prompt)), max_new_tokens=new, due_at=urgency)
        scheduler.submit(request)
        left[request.id] = new
    while left:
        step = planned(scheduler)
        assert 0 < sum(len(chunk.tokens) for chunk in step.chunks) <= LIMITS.step_tokens
        assert len({chunk.slot for chunk in step.chunks}) == len(step.chunks)
        assert scheduler.busy_slots <= LIMITS.slots
        for name in computed(scheduler, step):
            left[name] -= 1
            if not left[name]:
                scheduler.finish(name)
                del left[name]
    assert scheduler.next_step() is None
    assert (scheduler.running, scheduler.waiting, scheduler.busy_slots, scheduler.pending_tokens) == (0, 0, 0, 0)


def test_decodes_precede_prefills_in_deadline_order():
    scheduler = Scheduler(LIMITS)
    scheduler.submit(a_request("first", prompt=4))
    computed(scheduler, planned(scheduler))
    scheduler.submit(a_request("patient", due_at=9))
    scheduler.submit(a_request("hurried", due_at=1))

    step = planned(scheduler)

    assert [chunk.request_id for chunk in step.decodes] == ["first"]
    assert [(chunk.request_id, len(chunk.tokens)) for chunk in step.prefills] == [("hurried", 7)]


def test_text_only_prompts_share_each_step_with_images():
    scheduler = Scheduler(LIMITS)
    image = Image("a", start=1, placeholders=9, tokens=9)
    scheduler.submit(a_request("image", prompt=30, images=(image,), due_at=1))
    scheduler.submit(a_request("text", prompt=10, due_at=2))

    for _ in range(2):
        step = planned(scheduler)
        assert [(chunk.request_id, len(chunk.tokens)) for chunk in step.prefills] == [("image", 4), ("text", 4)]
        computed(scheduler, step)


def test_short_text_prompts_get_two_of_three_steps():
    scheduler = Scheduler(LIMITS, share_prefixes=False)
    image = Image("a", start=1, placeholders=9, tokens=9)
    scheduler.submit(a_request("image", prompt=30, images=(image,), due_at=1))
    tokens = []
    for number in range(6):
        scheduler.submit(a_request(f"text {number}", prompt=3 - number % 2, new=1, due_at=2))
        step = planned(scheduler)
        tokens.append({chunk.request_id: len(chunk.tokens) for chunk in step.prefills})
        for name in computed(scheduler, step):
            scheduler.finish(name)

    assert tokens[0] == {"text 0": 3}
    assert tokens[2] == {"text 2": 3, "image": 5}
    assert ["image" in step for step in tokens] == [False, False, True] * 2


def test_constant_text_leaves_images_a_quarter_of_third_steps():
    scheduler = Scheduler(EngineLimits(slots=5, slot_tokens=5_000, step_tokens=256), share_prefixes=False)
    placeholders = 4_000
    image = Image("a", start=1, placeholders=placeholders, tokens=placeholders)
    scheduler.submit(a_request("image", prompt=placeholders + 9, images=(image,)))
    tokens = []
    for number in range(6):
        scheduler.submit(a_request(f"text {number}", prompt=40, new=1))
        step = planned(scheduler)
        computed(scheduler, step)
        tokens.append(sum(len(chunk.tokens) for chunk in step.prefills))
        scheduler.finish(f"text {number}")

    assert tokens == [40, 40, 40 + 64] * 2


def test_image_steps_are_short_while_text_is_expected():
    scheduler, placeholders = Scheduler(EngineLimits(slots=3, slot_tokens=50_000, step_tokens=256)), 40_000
    image = Image("a", start=1, placeholders=placeholders, tokens=placeholders)
    scheduler.submit(a_request("image", prompt=placeholders + 9, images=(image,)))
    computed(scheduler, planned(scheduler))
    scheduler.submit(a_request("text", prompt=3, new=1))
    for name in computed(scheduler, planned(scheduler)):
        scheduler.finish(name)

    tokens = []
    for _ in range(TEXT_ONLY_MEMORY_STEPS + 3):
        step = planned(scheduler)
        computed(scheduler, step)
        tokens.append(sum(len(chunk.tokens) for chunk in step.prefills))

    assert tokens == [64] * (TEXT_ONLY_MEMORY_STEPS - 1) + [256] * 4


def test_text_takes_whole_step_without_images():
    scheduler = Scheduler(LIMITS)
    scheduler.submit(a_request("text", prompt=20))

    assert [len(chunk.tokens) for chunk in planned(scheduler).prefills] == [LIMITS.step_tokens]


def test_shared_prefix_is_computed_once():
    scheduler = Scheduler(LIMITS)
    scheduler.submit(Request("one", (1, 2, 3, 4, 5, 6), max_new_tokens=9))
    computed(scheduler, planned(scheduler))
    scheduler.submit(Request("other", (1, 2, 3, 4, 9), max_new_tokens=9))

    step = planned(scheduler)

    lease = step.admissions[0].lease
    assert (lease.reused_tokens, lease.copy_from) == (4, step.decodes[0].slot)
    assert step.prefills[0].tokens == (9,)
    assert scheduler.usage("other") == (0, 4)


@pytest.mark.parametrize(("field", "value"), [("tenant", "another"), ("images", (Image("another picture", 1, 1, 4),))])
def test_prefixes_are_not_shared_across_tenants_or_images(field, value):
    scheduler = Scheduler(EngineLimits(slots=3, slot_tokens=40, step_tokens=8, image_tokens=9), cross_attention=True)
    picture = (Image("a picture", 1, 1, 4),)
    scheduler.submit(Request("one", (1, 2, 3, 4, 5), max_new_tokens=9, images=picture))
    computed(scheduler, planned(scheduler))
    scheduler.submit(Request("two", (1, 2, 3, 4, 5), max_new_tokens=9, **{"images": picture, field: value}))
    scheduler.submit(Request("three", (1, 2, 3, 4, 5), max_new_tokens=9, images=picture))

    admitted = {each.request.id: each.lease.reused_tokens for each in planned(scheduler).admissions}

    assert admitted == {"two": 0, "three": 4}


def test_different_image_ends_the_shared_prefix():
    scheduler = Scheduler(LIMITS)
    scheduler.submit(Request("one", (1, 7, 7, 2), max_new_tokens=9, images=(Image("cat", 1, 2, 2),)))
    computed(scheduler, planned(scheduler))
    scheduler.submit(Request("other", (1, 7, 7, 2), max_new_tokens=9, images=(Image("dog", 1, 2, 2),)))

    assert planned(scheduler).admissions[0].lease.reused_tokens == 1


def test_oversized_or_duplicate_request_is_rejected():
    scheduler = Scheduler(LIMITS)
    scheduler.submit(a_request("fits"))
    with pytest.raises(RequestError, match="38 tokens and 5 new ones are 43; should be at most 40 together"):
        scheduler.submit(a_request("long", prompt=38))
    with pytest.raises(RequestError, match="'fits' is in flight"):
        scheduler.submit(a_request("fits"))

    assert [chunk.request_id for chunk in planned(scheduler).chunks] == ["fits"]


def test_full_queue_rejects_requests():
    scheduler = Scheduler(LIMITS)
    for number in range(LIMITS.max_waiting):
        scheduler.submit(a_request(f"r{number}"))

    with pytest.raises(EngineBusy, match="50 requests wait"):
        scheduler.submit(a_request("more"))


def test_finished_request_frees_its_slot():
    scheduler = Scheduler(LIMITS)
    names = [f"r{number}" for number in range(4)]
    for name in names:
        scheduler.submit(a_request(name, prompt=2))
    planned(scheduler)
    assert scheduler.waiting == 1

    assert scheduler.finish("r1")
    assert not scheduler.finish("r1")

    assert [each.request.id for each in planned(scheduler).admissions] == ["r3"]


def test_request_without_its_first_image_blocks_no_other():
    scheduler = Scheduler(EngineLimits(slots=1, slot_tokens=40, step_tokens=8))
    pictured = Request("pictured", (7, 7, 1), max_new_tokens=9, images=(Image("cat", 0, 2, 2),))
    scheduler.submit(pictured, encoded=(False,))
    scheduler.submit(Request("text", (1, 2, 3), max_new_tokens=9, due_at=1))

    assert [chunk.request_id for chunk in planned(scheduler).chunks] == ["text"]


def test_step_tokens_below_slots_is_rejected():
    with pytest.raises(ValueError, match="step_tokens is 4; should be above slots, 4"):
        EngineLimits(slots=4, step_tokens=4)


def test_request_that_waits_for_image_yields_its_slot():
    scheduler = Scheduler(EngineLimits(slots=1, slot_tokens=40, step_tokens=20))
    image = Image("seen", start=4, placeholders=3, tokens=3)
    scheduler.submit(a_request("early", images=(image,)), (False,))
    assert [(chunk.start, len(chunk.tokens)) for chunk in planned(scheduler).chunks] == [(0, 4)]
    computed(scheduler, Step((), (), planned(scheduler).chunks))
    assert scheduler.next_step() is None

    scheduler.submit(a_request("half", images=(image,)), (False,))
    assert scheduler.next_step() is None  # neither can continue, so no slot changes hands
    scheduler.submit(a_request("whole"))
    assert computed(scheduler, planned(scheduler)) == ["whole"]
    assert (scheduler.running, scheduler.waiting) == (1, 2)

    scheduler.finish("half")
    scheduler.mark_image_ready("early", 0)
    assert computed(scheduler, planned(scheduler)) == ["whole"]  # a decoding request is not preempted
    scheduler.finish("whole")
    assert computed(scheduler, planned(scheduler)) == ["early"]
    scheduler.finish("early")
    assert (scheduler.running, scheduler.waiting, scheduler.busy_slots, scheduler.pending_tokens) == (0, 0, 0, 0)


def test_prefix_in_yielded_slot_is_reused():
    scheduler = Scheduler(EngineLimits(slots=2, slot_tokens=40, step_tokens=20))
    image = Image("seen", start=4, placeholders=3, tokens=3)
    for name in ("first", "other"):
        scheduler.submit(a_request(name, images=(image,)), (False,))
    computed(scheduler, planned(scheduler))
    scheduler.submit(a_request("whole", prompt=3))
    computed(scheduler, planned(scheduler))
    scheduler.finish("whole")
    for name in ("first", "other"):
        scheduler.mark_image_ready(name, 0)

    starts = sorted(chunk.start for chunk in planned(scheduler).chunks)
    assert starts[1] == 4


def serve(scheduler: Scheduler, request: Request) -> None:
    scheduler.submit(request)
    while scheduler.is_in_flight(request.id):
        for name in computed(scheduler, planned(scheduler)):
            scheduler.finish(name)


def test_slot_is_yielded_if_reused_prefix_ends_within_image():
    scheduler = Scheduler(EngineLimits(slots=1, slot_tokens=40, step_tokens=20))
    image = Image("seen", start=1, placeholders=4, tokens=4)
    serve(scheduler, Request("a", (1, 3, 3, 3, 3), images=(image,), max_new_tokens=5))
    scheduler.submit(Request("b", (1, 3, 3, 3, 3), images=(image,), max_new_tokens=5), (False,))
    assert planned(scheduler).chunks == ()  # all but the last position, an image row, is cached
    scheduler.submit(Request("c", (7, 8, 9), max_new_tokens=5))

    assert computed(scheduler, planned(scheduler)) == ["c"]
    scheduler.finish("c")
    scheduler.mark_image_ready("b", 0)
    assert computed(scheduler, planned(scheduler)) == ["b"]


@pytest.mark.parametrize(
    "segments", [((2, 2), (5, 2)), ((1, 2), (2, 2)), ((1, 2), (5, 1)), ((1, 4), (6, 0)), ((1, 2), (7, 2))]
)
def test_invalid_image_segments_are_rejected(segments):
    with pytest.raises(RequestError, match=r"image 0 has (segments .* should begin at 1|4 placeholders at 1)"):
        Request("r", (7,) * 8, images=(Image("cat", 1, 4, 4, segments=segments),))


def test_segmented_image_has_same_keys_as_contiguous_one():
    keys = position_keys((5, 9, 9, 6, 9, 7), [Image("cat", 1, 3, 3, segments=((1, 2), (4, 1)))])
    side_by_side = position_keys((9, 9, 9), [Image("cat", 0, 3, 3)])

    assert keys[[0, 3, 5]].tolist() == [5, 6, 7]
    assert keys[[1, 2, 4]].tolist() == side_by_side.tolist()


def keys(*runs: tuple[int, int]) -> np.ndarray:
    """Runs of (first, count)."""
    return np.concatenate([np.arange(first, first + count) for first, count in runs])


def served(table: KvSlotManager, prompt: np.ndarray, answer: int = 0) -> SlotLease:
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
