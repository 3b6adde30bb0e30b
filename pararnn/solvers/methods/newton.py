"""Newton's method over single steps: Algorithm 1 of Danieli et al. (arXiv:2510.21450)."""

from __future__ import annotations

from ..problem import Problem
from .shooting import Shooting


class Newton(Shooting):
    """Shooting with chunks of one step. Only on request: it moves every number several times."""

    name = "newton"

    def unfit(self, problem: Problem) -> str | None:
        if problem.method != self.name and problem.config.backend != "fused":
            return f"asked for: method={problem.method!r}; chunks of one step cost more"
        return super().unfit(problem)

    def asked_length(self, problem: Problem) -> tuple[int | None, str]:
        if problem.config.chunk_length not in (None, 1):
            raise ValueError(
                f"method='newton' has chunk_length 1, got {problem.config.chunk_length}; use "
                "method='shooting'."
            )
        return 1, "asked for: Newton over single steps"
