"""What would happen: a discrete-event simulation that drives the router's own desks and graph walk."""
