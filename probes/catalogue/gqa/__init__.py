"""Forms of probes for GQA models, which need or do something else than for other models."""
