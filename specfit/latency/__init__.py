"""How long decoding takes on the machine at hand, and what that is held against."""
