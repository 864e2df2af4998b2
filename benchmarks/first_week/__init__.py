"""A new user's first week on the command line: each fault is reported."""
