"""Multimodal load: how many images each chat shows, hour by hour."""
