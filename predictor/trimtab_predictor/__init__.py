"""What is coming: the peak load of the next seconds, from the load of the last two minutes.

Import what you need from its module: `trace` (recorded loads), `forecaster` (one signature, reactive, oracle), `lstm`
(the trained forecaster) and `guarded` (chooses between them by their recent errors). None of these needs TensorFlow.
"""
