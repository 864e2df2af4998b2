"""Training suites: they generate data, train the weights that the example pipelines serve, and measure them."""
