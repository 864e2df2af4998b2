"""Training of the digits pipeline: pages of handwritten digits, locators and readers."""
