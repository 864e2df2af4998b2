"""Tokens a second of the engine, against `generate` one request at a time and in a static batch, on one core."""
