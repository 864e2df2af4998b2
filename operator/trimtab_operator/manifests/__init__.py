"""What is written: every Kubernetes object of a pipeline, as a pure function of what was asked."""
