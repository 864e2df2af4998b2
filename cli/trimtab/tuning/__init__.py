"""Operating points for a user's own vision transformer: forms tried on this machine, those worth keeping chosen."""
