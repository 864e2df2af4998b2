"""One file a verb of the command line: read the options, do it, say what came of it."""
