"""Search for operating points of a vision transformer: measures candidates and selects the best."""
