"""Answers beside each other: log-likelihoods in nats, and flags of greedy continuations."""

CLOSE = 1e-4  # nats, of sums of log-probabilities in fp32 in other orders


def close(found, wanted) -> bool:
    return len(found) == len(wanted) and all(abs(a - b) < CLOSE for a, b in zip(found, wanted))


def agree(found, wanted) -> bool:
    """Of log-likelihoods, with equal flags of greedy continuations."""
    return close([a for a, _ in found], [a for a, _ in wanted]) and [g for _, g in found] == [g for _, g in wanted]
