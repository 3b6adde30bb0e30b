"""Card of the whole model (notes, sections 1 and 10 to 16)."""

from __future__ import annotations

from ..emitter import LanguageEmitter
from ..initial import DRMStateInitializer, TokenEmbedding
from ..model import DRM
from ..risk import RiskField
from .part import part
from .variants import TABLES

MODEL = part(
    "drm",
    DRM,
    TokenEmbedding,
    DRMStateInitializer,
    LanguageEmitter,
    RiskField,
    tables=TABLES,
)
