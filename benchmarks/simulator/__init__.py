"""Does the simulator tell the truth? The digits pipeline served and simulated, on the same arrivals."""
