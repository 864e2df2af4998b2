"""Training of the digits-av pipeline: digits as audio, video and text with known truth."""
