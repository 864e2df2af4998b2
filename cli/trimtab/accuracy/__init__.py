"""Measurement of the accuracies of variants and operating points on labelled samples."""
