"""Generated requests by the hundred thousand: valid ones, changed a little by a seeded draw."""
