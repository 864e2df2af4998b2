"""Who gets a slot, which tokens a step computes, and that everything comes back; without a model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_model_servers.engine.request import EngineBusy, Image, Request, RequestError, position_keys
from trimtab_model_servers.engine.scheduler import WORDS_REMEMBERED_STEPS, Limits, Scheduler, Step

LIMITS = Limits(slots=3, slot_tokens=40, step_tokens=8, waiting=50)


def a_request(name: str, prompt: int = 10, new: int = 5, **fields) -> Request:
    return Request(name, tuple(100 * len(name) + place for place in range(prompt)), max_new_tokens=new, **fields)


def planned(scheduler: Scheduler) -> Step:
    """The next step, of which there must be one."""
    step = scheduler.next_step()
    assert step is not None
    return step


def computed(scheduler: Scheduler, step: Step) -> list[str]:
    """Report a step as computed, each writer writing a token; return who wrote."""
    for part in step.parts:
        scheduler.computed(part)
        if part.writes:
            scheduler.wrote(part.request_id, 1)
    return [part.request_id for part in step.parts if part.writes]


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10), st.integers(0, 5)), min_size=1, max_size=12))
def test_every_request_writes_all_it_may_within_a_steps_tokens_and_slots(drawn):
    scheduler, left = Scheduler(LIMITS), {}
    for number, (prompt, new, urgency) in enumerate(drawn):
        request = Request(f"r{number}", tuple(range(number, number + prompt)), max_new_tokens=new, due_at=urgency)
        scheduler.submit(request)
        left[request.id] = new
    while left:
        step = planned(scheduler)
        assert 0 < sum(len(part.tokens) for part in step.parts) <= LIMITS.step_tokens
        assert len({part.slot for part in step.parts}) == len(step.parts)
        assert scheduler.busy_slots <= LIMITS.slots
        for name in computed(scheduler, step):
            left[name] -= 1
            if not left[name]:
                scheduler.finish(name)
                del left[name]
    assert scheduler.next_step() is None
    assert (scheduler.running, scheduler.waiting, scheduler.busy_slots, scheduler.pending_tokens) == (0, 0, 0, 0)


def test_who_writes_comes_before_prompts_and_the_most_urgent_prompt_first():
    scheduler = Scheduler(LIMITS)
    scheduler.submit(a_request("first", prompt=4))
    computed(scheduler, planned(scheduler))
    scheduler.submit(a_request("patient", due_at=9))
    scheduler.submit(a_request("hurried", due_at=1))

    step = planned(scheduler)

    assert [part.request_id for part in step.decodes] == ["first"]
    assert [(part.request_id, len(part.tokens)) for part in step.chunks] == [("hurried", 7)]


def test_words_alone_wait_behind_nobodys_images_and_leave_them_half_of_each_step():
    scheduler = Scheduler(LIMITS)
    image = Image("a", start=1, placeholders=9, tokens=9)
    scheduler.submit(a_request("shown", prompt=30, images=(image,), due_at=1))
    scheduler.submit(a_request("told", prompt=10, due_at=2))

    step = planned(scheduler)

    assert [(part.request_id, len(part.tokens)) for part in step.chunks] == [("shown", 4), ("told", 4)]
    computed(scheduler, step)
    assert [(part.request_id, len(part.tokens)) for part in planned(scheduler).chunks] == [("shown", 4), ("told", 4)]


def test_few_words_have_short_steps_to_themselves_and_images_at_least_every_third():
    scheduler = Scheduler(LIMITS, share_prefixes=False)
    image = Image("a", start=1, placeholders=9, tokens=9)
    scheduler.submit(a_request("shown", prompt=30, images=(image,), due_at=1))
    read = []
    for number in range(6):
        scheduler.submit(a_request(f"told {number}", prompt=3 - number % 2, new=1, due_at=2))
        step = planned(scheduler)
        read.append({part.request_id: len(part.tokens) for part in step.chunks})
        for name in computed(scheduler, step):
            scheduler.finish(name)

    assert read[0] == {"told 0": 3}
    assert read[2] == {"told 2": 3, "shown": 5}
    assert ["shown" in step for step in read] == [False, False, True] * 2


def test_words_in_every_step_leave_images_a_quarter_of_every_third():
    scheduler = Scheduler(Limits(slots=5, slot_tokens=5_000, step_tokens=256), share_prefixes=False)
    placeholders = 4_000
    image = Image("a", start=1, placeholders=placeholders, tokens=placeholders)
    scheduler.submit(a_request("shown", prompt=placeholders + 9, images=(image,)))
    read = []
    for number in range(6):
        scheduler.submit(a_request(f"told {number}", prompt=40, new=1))
        step = planned(scheduler)
        computed(scheduler, step)
        read.append(sum(len(part.tokens) for part in step.chunks))
        scheduler.finish(f"told {number}")

    assert read == [40, 40, 40 + 64] * 2


def test_steps_that_read_images_are_short_as_long_as_more_words_are_expected():
    scheduler, placeholders = Scheduler(Limits(slots=3, slot_tokens=50_000, step_tokens=256)), 40_000
    image = Image("a", start=1, placeholders=placeholders, tokens=placeholders)
    scheduler.submit(a_request("shown", prompt=placeholders + 9, images=(image,)))
    computed(scheduler, planned(scheduler))
    scheduler.submit(a_request("told", prompt=3, new=1))
    for name in computed(scheduler, planned(scheduler)):
        scheduler.finish(name)

    read = []
    for _ in range(WORDS_REMEMBERED_STEPS + 3):
        step = planned(scheduler)
        computed(scheduler, step)
        read.append(sum(len(part.tokens) for part in step.chunks))

    assert read == [64] * (WORDS_REMEMBERED_STEPS - 1) + [256] * 4


def test_words_take_all_of_a_step_where_nobody_shows_images():
    scheduler = Scheduler(LIMITS)
    scheduler.submit(a_request("told", prompt=20))

    assert [len(part.tokens) for part in planned(scheduler).chunks] == [LIMITS.step_tokens]


def test_a_prompt_that_begins_like_another_computes_the_rest_only():
    scheduler = Scheduler(LIMITS)
    scheduler.submit(Request("one", (1, 2, 3, 4, 5, 6), max_new_tokens=9))
    computed(scheduler, planned(scheduler))
    scheduler.submit(Request("other", (1, 2, 3, 4, 9), max_new_tokens=9))

    step = planned(scheduler)

    lease = step.admissions[0].lease
    assert (lease.reused, lease.source) == (4, step.decodes[0].slot)
    assert step.chunks[0].tokens == (9,)
    assert scheduler.usage("other") == (0, 4)


@pytest.mark.parametrize(("field", "value"), [("tenant", "another"), ("images", (Image("another picture", 1, 1, 4),))])
def test_prefixes_are_not_shared_across_tenants_nor_across_other_images(field, value):
    scheduler = Scheduler(Limits(slots=3, slot_tokens=40, step_tokens=8, image_tokens=9), across=True)
    picture = (Image("a picture", 1, 1, 4),)
    scheduler.submit(Request("one", (1, 2, 3, 4, 5), max_new_tokens=9, images=picture))
    computed(scheduler, planned(scheduler))
    scheduler.submit(Request("two", (1, 2, 3, 4, 5), max_new_tokens=9, **{"images": picture, field: value}))
    scheduler.submit(Request("three", (1, 2, 3, 4, 5), max_new_tokens=9, images=picture))

    admitted = {each.request.id: each.lease.reused for each in planned(scheduler).admissions}

    assert admitted == {"two": 0, "three": 4}


def test_another_image_behind_the_same_placeholders_is_another_prompt():
    scheduler = Scheduler(LIMITS)
    scheduler.submit(Request("one", (1, 7, 7, 2), max_new_tokens=9, images=(Image("cat", 1, 2, 2),)))
    computed(scheduler, planned(scheduler))
    scheduler.submit(Request("other", (1, 7, 7, 2), max_new_tokens=9, images=(Image("dog", 1, 2, 2),)))

    assert planned(scheduler).admissions[0].lease.reused == 1


def test_what_can_never_fit_is_refused_at_the_door_and_nobody_else_notices():
    scheduler = Scheduler(LIMITS)
    scheduler.submit(a_request("fits"))
    with pytest.raises(RequestError, match="38 tokens and 5 new ones are 43; should be at most 40 together"):
        scheduler.submit(a_request("long", prompt=38))
    with pytest.raises(RequestError, match="'fits' is in flight"):
        scheduler.submit(a_request("fits"))

    assert [part.request_id for part in planned(scheduler).parts] == ["fits"]


def test_as_many_wait_as_may_and_no_more():
    scheduler = Scheduler(LIMITS)
    for number in range(LIMITS.waiting):
        scheduler.submit(a_request(f"r{number}"))

    with pytest.raises(EngineBusy, match="50 requests wait"):
        scheduler.submit(a_request("more"))


def test_a_cancelled_request_gives_its_slot_to_who_waits():
    scheduler = Scheduler(LIMITS)
    names = [f"r{number}" for number in range(4)]
    for name in names:
        scheduler.submit(a_request(name, prompt=2))
    planned(scheduler)
    assert scheduler.waiting == 1

    assert scheduler.finish("r1")
    assert not scheduler.finish("r1")

    assert [each.request.id for each in planned(scheduler).admissions] == ["r3"]


def test_none_waits_behind_a_request_whose_first_image_is_not_there():
    scheduler = Scheduler(Limits(slots=1, slot_tokens=40, step_tokens=8))
    scheduler.submit(Request("pictured", (7, 7, 1), max_new_tokens=9, images=(Image("cat", 0, 2, 2),)), ready=(False,))
    scheduler.submit(Request("text", (1, 2, 3), max_new_tokens=9, due_at=1))

    assert [part.request_id for part in planned(scheduler).parts] == ["text"]


def test_a_step_that_could_not_hold_one_token_of_each_is_refused():
    with pytest.raises(ValueError, match="step_tokens is 4; should be above slots, 4"):
        Limits(slots=4, step_tokens=4)


def test_who_waits_for_an_image_gives_its_slot_to_who_can_go_on_and_goes_on_later():
    scheduler = Scheduler(Limits(slots=1, slot_tokens=40, step_tokens=20))
    image = Image("seen", start=4, placeholders=3, tokens=3)
    scheduler.submit(a_request("early", images=(image,)), (False,))
    assert [(part.start, len(part.tokens)) for part in planned(scheduler).parts] == [(0, 4)]
    computed(scheduler, Step((), (), planned(scheduler).parts))
    assert scheduler.next_step() is None

    scheduler.submit(a_request("half", images=(image,)), (False,))
    assert scheduler.next_step() is None  # neither can go on: a slot that changed hands would win nothing
    scheduler.submit(a_request("whole"))
    assert computed(scheduler, planned(scheduler)) == ["whole"]
    assert (scheduler.running, scheduler.waiting) == (1, 2)

    scheduler.finish("half")
    scheduler.image_ready("early", 0)
    assert computed(scheduler, planned(scheduler)) == ["whole"]  # who writes is not pushed out
    scheduler.finish("whole")
    assert computed(scheduler, planned(scheduler)) == ["early"]
    scheduler.finish("early")
    assert (scheduler.running, scheduler.waiting, scheduler.busy_slots, scheduler.pending_tokens) == (0, 0, 0, 0)


def test_what_was_computed_before_a_slot_was_given_away_is_not_computed_again_where_it_still_lies():
    scheduler = Scheduler(Limits(slots=2, slot_tokens=40, step_tokens=20))
    image = Image("seen", start=4, placeholders=3, tokens=3)
    for name in ("first", "other"):
        scheduler.submit(a_request(name, images=(image,)), (False,))
    computed(scheduler, planned(scheduler))
    scheduler.submit(a_request("whole", prompt=3))
    computed(scheduler, planned(scheduler))
    scheduler.finish("whole")
    for name in ("first", "other"):
        scheduler.image_ready(name, 0)

    starts = sorted(part.start for part in planned(scheduler).parts)
    assert starts[1] == 4


def ran(scheduler: Scheduler, request: Request) -> None:
    """Serve a request to its end; what it computed stays in its slot."""
    scheduler.submit(request)
    while scheduler.knows(request.id):
        for name in computed(scheduler, planned(scheduler)):
            scheduler.finish(name)


def test_an_image_that_lies_in_a_prefix_taken_over_is_not_waited_for():
    scheduler = Scheduler(Limits(slots=1, slot_tokens=40, step_tokens=20))
    image = Image("seen", start=1, placeholders=2, tokens=2)
    ran(scheduler, Request("a", (1, 3, 3, 9, 9, 9), images=(image,), max_new_tokens=5))
    scheduler.submit(Request("b", (1, 3, 3, 9, 9, 9), images=(image,), max_new_tokens=5), (False,))

    (part,) = planned(scheduler).parts

    assert (part.request_id, part.start, part.writes) == ("b", 5, True)


def test_who_has_more_of_an_image_taken_over_than_he_may_go_on_with_gives_his_slot_away():
    scheduler = Scheduler(Limits(slots=1, slot_tokens=40, step_tokens=20))
    image = Image("seen", start=1, placeholders=4, tokens=4)
    ran(scheduler, Request("a", (1, 3, 3, 3, 3), images=(image,), max_new_tokens=5))
    scheduler.submit(Request("b", (1, 3, 3, 3, 3), images=(image,), max_new_tokens=5), (False,))
    assert planned(scheduler).parts == ()  # all but its last position lies there, which is of the image
    scheduler.submit(Request("c", (7, 8, 9), max_new_tokens=5))

    assert computed(scheduler, planned(scheduler)) == ["c"]
    scheduler.finish("c")
    scheduler.image_ready("b", 0)
    assert computed(scheduler, planned(scheduler)) == ["b"]


@pytest.mark.parametrize(
    "pieces", [((2, 2), (5, 2)), ((1, 2), (2, 2)), ((1, 2), (5, 1)), ((1, 4), (6, 0)), ((1, 2), (7, 2))]
)
def test_an_image_in_pieces_that_are_not_all_of_it_is_refused(pieces):
    with pytest.raises(RequestError, match=r"image 0 stands (in pieces .* should begin at 1|at 1 for 4)"):
        Request("r", (7,) * 8, images=(Image("cat", 1, 4, 4, pieces=pieces),))


def test_an_image_in_pieces_has_its_rows_in_order_and_leaves_the_marks_between_as_they_are():
    keys = position_keys((5, 9, 9, 6, 9, 7), [Image("cat", 1, 3, 3, pieces=((1, 2), (4, 1)))])
    side_by_side = position_keys((9, 9, 9), [Image("cat", 0, 3, 3)])

    assert keys[[0, 3, 5]].tolist() == [5, 6, 7]
    assert keys[[1, 2, 4]].tolist() == side_by_side.tolist()
