"""Profiles of Hypothesis: ``ci`` draws the same examples every time, ``fuzz`` new ones.

``PARARNN_DEVICE=cuda`` runs every case on a GPU, where ``auto`` takes the kernels;
``PARARNN_BACKEND=fused`` asks for them, in Triton's interpreter on a CPU.
``PARARNN_EXAMPLES`` changes how many examples a property gets, in per cent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

hypothesis = pytest.importorskip("hypothesis")

CHECKS = list(hypothesis.HealthCheck)
hypothesis.settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, suppress_health_check=CHECKS,
    print_blob=False,
)  # fmt: skip
hypothesis.settings.register_profile(
    "fuzz", deadline=None, database=None, suppress_health_check=CHECKS, print_blob=True
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
