"""Servers of a replica: MLServer with the Torch runtime, and the data port."""
