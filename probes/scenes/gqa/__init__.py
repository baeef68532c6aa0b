"""What probes do on GQA models where it is not what they do on DeepSeek-V4 models."""
