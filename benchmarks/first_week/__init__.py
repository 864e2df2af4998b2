"""What a stranger does in the first week, by the command line alone: what goes wrong is told."""
