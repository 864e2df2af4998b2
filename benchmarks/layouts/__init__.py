"""Large multimodal models served whole and parted, on the same cores."""
