"""Kinds of payloads: what each request of a load carries, and how an answer is scored."""
