"""Planning: from measurements to a plan: options, integer program, relaxation and explanation."""
