"""Fits speculators to a target model and a traffic profile."""
