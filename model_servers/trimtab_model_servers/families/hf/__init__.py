"""Task families over transformers' Auto classes: a checkpoint in the Hub's layout; text and images in, answers out."""
