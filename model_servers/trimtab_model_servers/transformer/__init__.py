"""Vision transformer with token merging, prompts and several tasks, chosen per batch."""
