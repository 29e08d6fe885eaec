"""What latency a machine gives under a profile: a model of a pass, and a simulation of a server."""
