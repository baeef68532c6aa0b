"""Exchanges among the GPUs of one host by kernels that write the others' memory: of few numbers (`triton_one_shot`),
and sums of many (`triton_shares`)."""
