"""Which units of a target are served in FP4, and what that costs."""
