"""How good are the forecasts? Every forecaster on the same windows."""
