"""Error classes that commands map to exit codes: user errors and failed operations."""


class UserError(Exception):
    """Invalid input from a user; the message names it and the valid form."""


class OperationFailed(Exception):
    """An operation failed; the message says which, and why."""
