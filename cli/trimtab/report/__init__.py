"""What a run gave: a page to look at in a browser, and a few lines in the terminal."""
