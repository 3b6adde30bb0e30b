"""DRM: a state-space language model with learned directions and a learned metric.

Each file holds one section of the notes. The defaults are the notes; the semantics of the published
system are switches of :class:`DRMConfig`.
"""

from .block import block_states
from .bound import bound_state
from .config import PUBLISHED, DRMConfig
from .direction import DirectionField, Directions
from .dynamics import DRMDynamics, Geometry
from .emitter import LanguageEmitter
from .flow import DirectStateTransition, DRMFlow
from .initial import DRMStateInitializer, TokenEmbedding
from .losses import LossWeights, drm_loss
from .memory import SelectiveMemory
from .metric import Metric, RelationalMetric
from .mixer import CausalLocalMixer
from .model import DRM, DRMOutput, DRMState
from .naturalize import naturalize, naturalize_in_span, solve_metric
from .recurrent import recurrent_states
from .refinement import DRMRefinementLayer
from .residual import TokenStateResidual
from .risk import RiskField
from .rollout import Rollout
from .trace import Trace

__all__ = [
    "DRM",
    "PUBLISHED",
    "CausalLocalMixer",
    "DRMConfig",
    "DRMDynamics",
    "DRMFlow",
    "DRMOutput",
    "DRMRefinementLayer",
    "DRMState",
    "DRMStateInitializer",
    "DirectStateTransition",
    "DirectionField",
    "Directions",
    "Geometry",
    "LanguageEmitter",
    "LossWeights",
    "Metric",
    "RelationalMetric",
    "RiskField",
    "Rollout",
    "SelectiveMemory",
    "TokenEmbedding",
    "TokenStateResidual",
    "Trace",
    "block_states",
    "bound_state",
    "drm_loss",
    "naturalize",
    "naturalize_in_span",
    "recurrent_states",
    "solve_metric",
]
