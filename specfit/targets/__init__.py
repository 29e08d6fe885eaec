"""Frozen targets and their hidden states."""
