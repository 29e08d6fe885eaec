"""Translations of a speculator, one file an engine."""
