"""Values of a request: its options, its position in the pipeline graph, its task names, images and stream timing."""
