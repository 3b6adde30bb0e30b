"""Fused GPU kernels: one channelwise template, filled from a Spec.

``kernels.source(spec)`` is the text of a Spec's kernels. Launching needs Triton and a GPU (or
Triton's interpreter, for tests); everything else does not.
"""

from .support import channelwise, missing, source

__all__ = ["channelwise", "missing", "source"]
