"""digits-av served: jobs of several rows with floors, by our policy and by others, on recordings."""
