"""Router of one pipeline: ingress, admission, execution, scheduling, transport and observability."""
