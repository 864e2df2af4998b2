"""Load forecasting: the peak load of the next seconds, from the load of the last minutes and hours.

Modules: `trace` (recorded loads), `forecaster` (the common signature, reactive and oracle forecasters), `lstm` (the
trained forecaster) and `fallback_forecaster` (chooses between them by their recent errors). None of these needs
TensorFlow.
"""
