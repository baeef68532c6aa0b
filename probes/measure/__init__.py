"""The measuring commands: recall, fidelity, termination, sparse prefill, a room each; `base` is what they share."""
