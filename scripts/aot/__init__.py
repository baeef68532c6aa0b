"""Ahead-of-time cases: every kernel at production shapes, for `scripts/check_aot.py`.

A module here defines `cases() -> list[tuple[str, kernel, signature, constexprs, options]]`: a name, the @triton.jit
function, the type of each argument ("*bf16", "i32", …, "constexpr"), the values of the constexprs, and num_warps,
num_stages and the like. In options, `divisible` may list integer arguments that are multiples of 16 in production, as
strides are; pointers always are.
"""
