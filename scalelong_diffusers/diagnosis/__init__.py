"""Measures what the long skips of a model do to its features and gradients, and judges whether scaling may help."""
