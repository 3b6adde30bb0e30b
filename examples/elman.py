"""A cell of one's own: ``h' = tanh(w ⊙ h + u)``, defined in ten lines."""

import torch

from pararnn import Cell, Spec, tanh

# --8<-- [start:spec]
with Spec("Elman") as elman:
    h = elman.state("h", bounds=(-1, 1))
    (u,) = elman.drives("u")
    w = elman.map("w", structure="diagonal")
    elman.next(h, tanh(w(h) + u))
# --8<-- [end:spec]


# --8<-- [start:cell]
class Elman(Cell):
    spec = elman

    def recurrence(self, h, u, w):
        return torch.tanh(w * h + u)


# --8<-- [end:cell]


def factory() -> Elman:
    """A small one, for ``pytest conformance --cell examples.elman:factory``."""
    return Elman(d_in=5, d_h=6)
