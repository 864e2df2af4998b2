"""Training of the spoken-sums pipeline: synthesised sums in noise, their transcripts and their results."""
