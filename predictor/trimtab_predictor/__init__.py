"""Load forecasting: the peak load of the next seconds, from the load of the last minutes and hours."""
