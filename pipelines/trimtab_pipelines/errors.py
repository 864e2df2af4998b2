"""What goes wrong in two kinds, for whoever turns it into an exit code: a user's mistake, or something that failed."""


class UserError(Exception):
    """Something a user wrote cannot be; the message names it and says what would be right."""


class OperationFailed(Exception):
    """Something that should have worked did not; the message says what, and why."""
