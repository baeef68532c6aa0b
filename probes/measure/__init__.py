"""The measuring commands: recall, fidelity, termination, sparse prefill."""
