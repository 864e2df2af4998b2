"""Accuracies of a pipeline's variants, measured on a user's own samples."""
