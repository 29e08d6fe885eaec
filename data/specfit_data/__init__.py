"""Conversations: sources, templates, masks, splits."""
