"""Overload benchmark."""
