"""What is the case, and what follows: pods, rollouts, plans in force, conditions. Values in, values out."""
