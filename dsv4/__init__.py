"""dsv4 runs, measures and audits DeepSeek-V4-style models."""
