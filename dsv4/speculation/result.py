"""What speculation did for one row."""

from dataclasses import dataclass, field
from statistics import pvariance


@dataclass
class Speculation:
    """Counts of one row. `block_size_history`: drafted tokens of each verify pass of this row, 0 if it drafted none;
    `accepted_history`: how many of them became output.

    accepted: drafts that became output; those after a stop id did not. draft_steps: runs of the MTP block for this row
    while drafting, 0 for prompt lookup.
    """

    method: str
    proposed: int = 0
    accepted: int = 0
    verify_passes: int = 0
    draft_steps: int = 0
    block_size_history: list[int] = field(default_factory=list)
    accepted_history: list[int] = field(default_factory=list)

    def passed(self, proposed: int, accepted: int, draft_steps: int) -> None:
        """Count one verify pass."""
        self.proposed += proposed
        self.accepted += accepted
        self.verify_passes += 1
        self.draft_steps += draft_steps
        self.block_size_history.append(proposed)
        self.accepted_history.append(accepted)

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts / proposed drafts; None if nothing was proposed."""
        return self.accepted / self.proposed if self.proposed else None

    @property
    def mean_block_size(self) -> float | None:
        """Drafted tokens a verify pass; None before the first."""
        return self.proposed / self.verify_passes if self.verify_passes else None

    @property
    def block_size_variance(self) -> float | None:
        """Of drafted tokens over verify passes (population variance); None before the first."""
        return float(pvariance(self.block_size_history)) if self.block_size_history else None

    def document(self, new_tokens: int) -> dict:
        """JSON values. tokens_per_pass leaves out the first token, which prefill gave."""
        passes = self.verify_passes
        return {
            "method": self.method,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "acceptance": self.acceptance,
            "verify_passes": passes,
            "draft_steps": self.draft_steps,
            "mean_block_size": self.mean_block_size,
            "block_size_variance": self.block_size_variance,
            "tokens_per_pass": (new_tokens - 1) / passes if passes else None,
            "block_size_history": self.block_size_history,
            "accepted_history": self.accepted_history,
        }
