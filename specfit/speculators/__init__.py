"""Draft models, one file an architecture."""
