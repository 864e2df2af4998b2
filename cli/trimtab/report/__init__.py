"""Report of a run: an HTML page, live during the run, and a summary in the terminal."""
