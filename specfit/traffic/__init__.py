"""What the traffic is: profiles, fingerprints, logs, drift, and drawing from them."""
