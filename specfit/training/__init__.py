"""Training of a head: steps, checkpoints, processes."""
