"""Builders of the small models that tests and the offline demo use."""
