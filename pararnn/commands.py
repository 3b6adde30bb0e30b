"""What the commands in a terminal share: problems, progress, arguments."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["Problem", "device", "nearest", "positive", "progress", "seed"]


class Problem(Exception):
    """Something that the user can put right; the message is one sentence that says how."""


def progress(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


def positive(text: str) -> int:
    """An argument that is a positive integer."""
    return _integer(text, 1, None, "a positive integer")


def seed(text: str) -> int:
    """An argument that a generator takes as its seed."""
    return _integer(text, 0, 2**32 - 1, "an integer from 0 to 4294967295")


def _integer(text: str, least: int, most: int | None, wanted: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        raise argparse.ArgumentTypeError(f"got {text}, expected {wanted}")
    return value


def device(name: str) -> torch.device:
    """The device of this name, which takes tensors here.

    Raises
    ------
    Problem
        If there is none.
    """
    import torch

    try:
        found = torch.device(name)
        torch.zeros(1, device=found)
    except (RuntimeError, AssertionError) as error:
        raise Problem(f"--device {name}: {str(error).splitlines()[0]}") from None
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """A question that names what is nearest to a name, if anything is."""
    by_letters = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), by_letters, n=1)
    return f" Did you mean {by_letters[near[0]]!r}?" if near else ""
