"""Exchanges of a few bytes among the GPUs of one host, each as one kernel (`triton_one_shot`)."""
