"""Model families: one module or package each, imported on first use."""
