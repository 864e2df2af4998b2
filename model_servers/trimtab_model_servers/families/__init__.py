"""Which architecture a family name stands for. One file a family; each is imported when first asked for."""
