"""A hung replica is distinguished from a busy one."""

from trimtab.local.replica_manager import BUSY_HANG_SECONDS, IDLE_HANG_SECONDS, HangDetector


def test_idle_replica_hangs_soon() -> None:
    detector = HangDetector.update(None, 0.0, computes=False)
    assert not detector.hangs(0.1)
    detector = HangDetector.update(detector, IDLE_HANG_SECONDS, computes=False)
    assert detector.hangs(IDLE_HANG_SECONDS)


def test_busy_replica_hangs_after_a_longer_time() -> None:
    detector = HangDetector.update(None, 0.0, computes=True)
    for tenth in range(1, int(10 * BUSY_HANG_SECONDS)):
        detector = HangDetector.update(detector, tenth / 10, computes=True)
        assert not detector.hangs(tenth / 10)
    assert HangDetector.update(detector, BUSY_HANG_SECONDS, computes=True).hangs(BUSY_HANG_SECONDS)
