"""One file a stage."""
