"""Local runtime: a supervisor and the processes it runs for a plan."""
