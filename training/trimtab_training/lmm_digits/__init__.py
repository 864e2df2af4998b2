"""Training of the lmm-digits pipeline: questions about pages of digits and two multimodal models."""
