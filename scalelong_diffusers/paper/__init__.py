"""Rerun the theorems, figures and tables of the paper at a small size. Used by `scalelong paper`."""
