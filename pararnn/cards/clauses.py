"""Names and numbers of the contract's clauses, for links from cards.

The clauses themselves are in the conformance suite, which is no part of the package; a test
compares the two.
"""

from __future__ import annotations

NUMBERS = {
    "equation": 1,
    "jacobian-proof": 2,
    "jacobian": 3,
    "structure": 4,
    "residual": 5,
    "agreement": 6,
    "linear-solve": 7,
    "gradients": 8,
    "double-backward": 9,
    "convergence": 10,
    "pinned": 11,
    "divergence": 12,
    "bounds": 13,
    "certificate": 14,
    "causality": 15,
    "batch-independence": 16,
    "streaming": 17,
    "resets": 18,
    "variable-length": 19,
    "backends": 20,
    "determinism": 21,
    "invariances": 22,
    "shapes": 23,
    "half-precision": 24,
    "constraint": 25,
    "errors": 26,
    "nan-containment": 27,
    "time-gap": 28,
    "linearity": 29,
    "orthogonality": 30,
    "positivity": 31,
    "snap": 32,
    "decay": 33,
    "readout": 34,
    "drm-model": 35,
    "drm-metric": 36,
    "drm-span": 37,
    "drm-ablation": 38,
    "drm-paths": 39,
    "drm-causality": 40,
    "drm-streaming": 41,
    "drm-memory": 42,
    "drm-terms": 43,
    "scale": 44,
    "finite": 45,
    "scan-range": 46,
    "memory": 47,
    "modules": 48,
    "task-answers": 49,
}


def number(slug: str) -> int:
    """Number of the clause with this name.

    Raises
    ------
    ValueError
        If the contract has no such clause.
    """
    if slug not in NUMBERS:
        raise ValueError(
            f"got clause {slug!r}, expected one of the contract's: {', '.join(NUMBERS)}."
        )
    return NUMBERS[slug]


def is_test(checked_by: str) -> bool:
    """Whether a deviation names a test file in place of a clause."""
    return checked_by.startswith("tests/")


def label(slug: str) -> str:
    """Clause as cards name it, ``C4 structure``; a test file by its path."""
    if is_test(slug):
        return slug
    return f"C{number(slug)} {slug}"


def anchor(slug: str) -> str:
    """Place of the clause on the contract's page: ``c4``."""
    return f"c{number(slug)}"
