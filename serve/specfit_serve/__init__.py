"""The decode loop: draft, verify, count."""
