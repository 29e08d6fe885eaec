"""Hidden states on disk and on the fly."""
