"""Diffusers models with scaled long skips."""
