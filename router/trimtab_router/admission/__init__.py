"""Who is let in: what a request must be, how much may be under way, and how many at a time."""
