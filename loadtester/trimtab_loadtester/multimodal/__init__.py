"""Multimodal load: rates, sizes and requests with and without images."""
