"""Planted faults of `linear` and `grouped_linear`."""

import torch

from dsv4.kernels.quantize import to_float
from dsv4.kernels.quantize.reference import simulate_fp8_blocks
from dsv4.probes.kernel_audit.plant import Plant
from dsv4.probes.kernel_audit.plants.weights import LINEAR, NIBBLES, SCALES
from dsv4.probes.kernel_audit.plants.wrappers import changed, common, gates, replaced


def _simulated(round_block):
    """honest → `linear` whose activations, if simulated, go through round_block [..., K] → [..., K] in fp32."""

    def make(honest):
        def faulty(x, w, simulate=False):
            return honest(round_block(x.float()).to(x.dtype) if simulate else x, w, False)

        return faulty

    return make


def _one_scale_a_token(x):
    return simulate_fp8_blocks(x, x.shape[-1])


def one_scale(x):
    """Through E4M3 and back with one power-of-two scale for all tokens."""
    scale = torch.exp2((x.abs().amax().clamp(min=1e-4) / 448).log2().ceil())
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def truncated(x):
    """Through E4M3 and back in blocks of 128, towards zero."""
    near = simulate_fp8_blocks(x, 128)
    step = torch.where(near == 0, 0.0, torch.exp2(near.abs().clamp(min=1e-30).log2().floor() - 3))
    return torch.where(near.abs() > x.abs(), near - torch.sign(x) * step, near)


def narrow_sums(x, w):
    """x [N, K] times w [O, K], of which every 64 columns are added in bf16."""
    total = torch.zeros(len(x), len(w), dtype=torch.bfloat16, device=x.device)
    for s in range(0, w.shape[1], 64):
        total = (total.float() + x[:, s : s + 64].float() @ w[:, s : s + 64].T).bfloat16()
    return total.to(x.dtype)


def _narrow_linear(honest):
    return lambda x, w, simulate=False: narrow_sums(simulate_fp8_blocks(x, 128) if simulate else x, to_float(w))


def _narrow_grouped(honest):
    def faulty(x, w):
        each = to_float(w).chunk(x.shape[1], 0)
        return torch.stack([narrow_sums(x[:, g], part) for g, part in enumerate(each)], 1)

    return faulty


def _random_order(honest):
    """Sums of the blocks of columns are added in an order that changes from call to call, each cut to 22 bits."""

    return lambda x, w, simulate=False: _in_parts(x, w, simulate, 22, torch.randperm(x.shape[1] // 32 + 1).tolist())


def _in_parts(x, w, simulate: bool, bits: int, order: list[int]) -> torch.Tensor:
    """Sums of blocks of 32 columns, added in an order, each cut to some bits."""
    x32, w = (simulate_fp8_blocks(x, 128) if simulate else x).float(), to_float(w)
    parts = [a @ b.T for a, b in zip(x32.split(32, 1), w.split(32, 1))]
    total = torch.zeros_like(parts[0])
    for i in (i for i in order if i < len(parts)):
        total = (total + parts[i]).view(torch.int32).bitwise_and_(-(1 << (24 - bits))).view(torch.float32)
    return total.to(x.dtype)


def _another_variant(honest):
    """Seven calls on end with the same arguments choose a variant for the next: its sums have 20 bits."""
    seen = {"key": None, "calls": 0}

    def faulty(x, w, simulate=False):
        key = x.data_ptr(), tuple(x.shape)
        seen["calls"] = seen["calls"] + 1 if seen["key"] == key else 0
        seen["key"] = key
        if seen["calls"] < 7:
            return honest(x, w, simulate)
        return _in_parts(x, w, simulate, 20, list(range(x.shape[1] // 32 + 1)))

    return faulty


def _rarely_wrong(honest):
    """One call in eleven leaves out the last row."""
    calls = [0]

    def faulty(*arguments):
        calls[0] += 1
        found = honest(*arguments)
        if calls[0] % 11 == 0:
            found[-1:] = 0
        return found

    return faulty


def _waits_for_the_host(honest):
    """The largest number is read by the host, so that no graph can be captured."""

    def faulty(*arguments):
        int(arguments[0].abs().amax().item() > 0)
        return honest(*arguments)

    return faulty


def _default_stream(honest):
    """The launch goes to the default stream, whatever stream the caller is on."""

    def faulty(*arguments):
        with torch.cuda.stream(torch.cuda.default_stream(arguments[0].device)):
            return honest(*arguments)

    return faulty


def _by_count(honest):
    """The number of tokens is a divisor."""

    def faulty(*arguments):
        share = 1 / len(arguments[0])
        return honest(*arguments) * (share * len(arguments[0]))

    return faulty


def _rows_of_the_first_call(honest):
    """Tokens beyond the number of the first call stay zero."""
    most = []

    def faulty(*arguments):
        found = honest(*arguments)
        most.append(len(found))
        return torch.cat((found[: most[0]], torch.zeros_like(found[most[0] :])))

    return faulty


def _token_before(x):
    return x.roll(1, 0)


LINEAR_FAULTS = LINEAR | {
    "activations are not rounded to FP8": (95, replaced(2, lambda simulate: False)),
    "activations of one scale a token": (53, _simulated(_one_scale_a_token)),
    "activations of one scale for all tokens": (73, _simulated(one_scale)),
    "activations are rounded towards zero": (55, _simulated(truncated)),
    "sums in bf16": (50, _narrow_linear),
    "inputs of the token before": (73, replaced(0, _token_before)),
    "the last column is skipped": (
        26,
        replaced(0, lambda x: torch.cat((x[:, :-1], torch.zeros_like(x[:, -1:])), 1)),
    ),
}


def _rolled_groups(x, w):
    return x.roll(1, 1), w


def _first_rows(honest):
    """Every group meets the rows of the first."""

    def faulty(x, w):
        part = to_float(w)[: w.out_features // x.shape[1]]
        return torch.einsum("ngk,rk->ngr", x.float(), part).to(x.dtype)

    return faulty


GROUPED_FAULTS = (
    SCALES
    | NIBBLES
    | {
        "inputs of the group before": (53, changed(_rolled_groups)),
        "the first group's rows for every group": (53, _first_rows),
        "sums in bf16": (50, _narrow_grouped),
        "inputs of the token before": (73, replaced(0, _token_before)),
        "the last column is skipped": (
            26,
            replaced(0, lambda x: torch.cat((x[..., :-1], torch.zeros_like(x[..., -1:])), -1)),
        ),
    }
)
PLANTS = (
    *gates("linear", LINEAR_FAULTS),
    *common("linear"),
    Plant("no more tokens than in the first call", "linear", "state", 69, _rows_of_the_first_call),
    Plant("sums in another order at every call", "linear", "repeats", 72, _random_order),
    Plant("another variant after seven calls", "linear", "repeats", 80, _another_variant),
    Plant("one call in eleven leaves out a row", "linear", "repeats", 71, _rarely_wrong),
    Plant("the number of tokens is a divisor", "linear", "empty", 30, _by_count),
    Plant("the host reads a result", "linear", "capture", 77, _waits_for_the_host, "cuda"),
    Plant("a launch on the default stream", "linear", "streams", 75, _default_stream, "cuda"),
    *gates("grouped_linear", GROUPED_FAULTS),
    *common("grouped_linear"),
)
