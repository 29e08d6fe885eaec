"""Number formats and kernels."""
