"""Captions become what a model attends to: with a CLIP that is there, with one made of the captions, or as in SD."""
