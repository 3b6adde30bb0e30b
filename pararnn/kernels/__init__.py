"""Fused GPU kernels for every channelwise Spec.

``kernels.source(spec)`` is the text of a Spec's device programs, which the kernels call. Launching needs Triton and a GPU (or
Triton's interpreter, for tests); everything else does not.
"""

from .support import channelwise, missing, source

__all__ = ["channelwise", "missing", "source"]
