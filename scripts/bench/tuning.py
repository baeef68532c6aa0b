"""What scripts that choose tiles by time have in common."""

import argparse
import sys
from collections.abc import Sequence

import torch


def asked(doc: str, what: str, tokens: Sequence[int], seconds: float) -> argparse.Namespace | None:
    """The command line: numbers of tokens, and seconds after which nothing is begun. Without a GPU None, and a line to
    stderr that says that `what` needs one."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=list(tokens))
    parser.add_argument("--seconds", type=float, default=seconds)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"error: {what} are timed on a CUDA device; there is none", file=sys.stderr)
        return None
    return args
