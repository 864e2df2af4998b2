"""Trimtab in a real cluster: what a user would see, and what they see when parts of it break."""
