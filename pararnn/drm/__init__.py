"""DRM: a state-space language model with learned directions and a learned metric.

Each file holds one section of the notes. The defaults are the notes; the semantics of the published
system are switches of :class:`DRMConfig`.
"""

from .config import PUBLISHED, DRMConfig

__all__ = ["PUBLISHED", "DRMConfig"]
