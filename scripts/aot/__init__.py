"""Ahead-of-time cases: every kernel at production shapes, for `scripts/check_aot.py`.

A module here defines `cases_for(capability) -> list[tuple[str, kernel, signature, constexprs, options]]`: a name, the
@triton.jit function, the type of each argument ("*bf16", "i32", …, "constexpr"), the values of the constexprs, and
num_warps, num_stages and the like; `attrs` in options has what Triton knows of arguments, as that they divide by 16.
"""
