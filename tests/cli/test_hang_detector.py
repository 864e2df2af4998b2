"""A replica that hangs is told from one that is busy."""

from trimtab.local.hang_detector import BUSY_SECONDS, IDLE_SECONDS, HangDetector


def test_one_that_computes_nothing_hangs_soon() -> None:
    silence = HangDetector.update(None, 0.0, computes=False)
    assert not silence.hangs(0.1)
    silence = HangDetector.update(silence, IDLE_SECONDS, computes=False)
    assert silence.hangs(IDLE_SECONDS)


def test_one_that_computes_has_more_time_but_not_for_ever() -> None:
    silence = HangDetector.update(None, 0.0, computes=True)
    for tenth in range(1, int(10 * BUSY_SECONDS)):
        silence = HangDetector.update(silence, tenth / 10, computes=True)
        assert not silence.hangs(tenth / 10)
    assert HangDetector.update(silence, BUSY_SECONDS, computes=True).hangs(BUSY_SECONDS)
