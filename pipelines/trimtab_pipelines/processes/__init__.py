"""Child processes: starting, stopping, ready lines, and scheduling and memory settings."""
