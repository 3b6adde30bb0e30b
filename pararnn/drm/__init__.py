"""DRM: a state-space language model with learned directions and a learned metric.

Each file holds one section of the notes. The defaults are the notes; the semantics of the published
system are switches of :class:`DRMConfig`.
"""

from .block import block_states, blockwise_states
from .bound import bound_state
from .config import PUBLISHED, DRMConfig
from .consistency import Blocks
from .diagnostics import (
    effective_rank,
    fisher_energy,
    fisher_metric,
    frame_holonomy,
    kernel_fraction,
    participation_ratio,
)
from .direction import DirectionField, Directions
from .dynamics import DRMDynamics, Geometry
from .emitter import LanguageEmitter
from .flow import DirectStateTransition, DRMFlow
from .generation import Stream, generate, read, start_stream
from .initial import DRMStateInitializer, TokenEmbedding
from .losses import Loss, LossWeights, block_consistency, cross_entropy, drm_loss
from .memory import SelectiveMemory
from .metric import Metric, RelationalMetric
from .mixer import CausalLocalMixer
from .model import DRM, DRMOutput, DRMState
from .mqar import RecallResult, recall_probe
from .naturalize import naturalize, naturalize_in_span, solve_metric
from .parallel import block_gap, parallel_rollout, parallel_states
from .recurrent import recurrent_states
from .refinement import DRMRefinementLayer
from .residual import TokenStateResidual
from .risk import RiskField
from .rollout import Rollout
from .sweeps import Sweeps, sweep_states
from .torus import torus_angles, torus_coordinates, torus_difference, torus_distance
from .trace import Trace
from .variants import (
    AUXILIARY,
    CONTROLS,
    VARIANTS,
    Variant,
    matched_memory,
    parameter_count,
    variant,
)

__all__ = [
    "AUXILIARY",
    "CONTROLS",
    "DRM",
    "PUBLISHED",
    "VARIANTS",
    "Blocks",
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
    "Loss",
    "LossWeights",
    "Metric",
    "RecallResult",
    "RelationalMetric",
    "RiskField",
    "Rollout",
    "SelectiveMemory",
    "Stream",
    "Sweeps",
    "TokenEmbedding",
    "TokenStateResidual",
    "Trace",
    "Variant",
    "block_consistency",
    "block_gap",
    "block_states",
    "blockwise_states",
    "bound_state",
    "cross_entropy",
    "drm_loss",
    "effective_rank",
    "fisher_energy",
    "fisher_metric",
    "frame_holonomy",
    "generate",
    "kernel_fraction",
    "matched_memory",
    "naturalize",
    "naturalize_in_span",
    "parallel_rollout",
    "parallel_states",
    "parameter_count",
    "participation_ratio",
    "read",
    "recall_probe",
    "recurrent_states",
    "solve_metric",
    "start_stream",
    "sweep_states",
    "torus_angles",
    "torus_coordinates",
    "torus_difference",
    "torus_distance",
    "variant",
]
