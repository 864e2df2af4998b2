"""Training of the vit-tasks pipeline: four tasks of grey images and one vision transformer that serves them all."""
