"""What a command that a signal ended says by its exit code."""

import signal


def exit_code(number: signal.Signals) -> int:
    """The code that shells give a signal: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + number
