"""Hostile and careless callers beside a friendly load: each gets its code or is cut, and nobody else notices."""
