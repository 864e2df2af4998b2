"""Makes plans true on this machine: one supervisor, and the processes it starts, watches and stops."""
