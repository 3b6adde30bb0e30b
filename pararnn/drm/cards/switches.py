"""Where the published system differs from its notes, switch by switch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pararnn.cells import Switch

from ..config import DRMConfig

_ROWS = (
    Switch(
        "block_carry",
        "the next block starts from the base state at the end of the last one (section 7)",
        "it starts from the final state, with mixer, token residual and memory",
        "with the notes these three are read-outs that never act on the dynamics; without a memory "
        "the order of the tokens of earlier blocks is then lost",
    ),
    Switch(
        "recurrent_corrections",
        "mixer, token residual and memory act on the states of every path (sections 7 to 9)",
        "they act on the block path only; the recurrent path ignores them, and refinement too",
        "with the published value a model with these parts has them, unused, on the recurrent and "
        "the parallel path; none on the block path",
    ),
    Switch(
        "bound_increments",
        "the sum of a block is bounded, once (sections 6 and 7)",
        "each increment is bounded too, before it is summed",
        "the bound is no projection: applied to each increment, it moves a state of large norm "
        "even where all velocities are zero",
    ),
    Switch(
        "bound_corrections",
        "mixer, token residual and memory are added as they are (sections 7 to 9)",
        "the state is bounded again after each of them",
        "little while states are small against the radius",
    ),
    Switch(
        "memory_start",
        "one recurrence over the whole sequence, from zero (section 9)",
        "it restarts in each block, from the state at the block's start",
        "with the published value only what reached the state is remembered across blocks",
    ),
    Switch(
        "naturalization_precision",
        "the system is solved in float64 and rounded once, at the end",
        "the correction is rounded to the dtype of the velocity before it is subtracted",
        "in half precision the published value loses all digits where the terms cancel",
    ),
    Switch(
        "evaluation_strength",
        "evaluation uses the strength of the last training step, the full one if there was none",
        "evaluation uses the full strength",
        "none after the warm-up; before, the published system evaluates with a strength that no "
        "training step had",
    ),
    Switch(
        "naturalization_warmup",
        "the strength is constant (section 5)",
        "it grows from 0 over 500 training steps, where it is not 0",
        "none after the warm-up",
    ),
    Switch(
        "action_form",
        "the action is the sum of dt times the energies (section 11)",
        "the mean of the energies, without dt",
        "the weight of the action means something else; none where it is 0, as in J",
    ),
)


def _valued(row: Switch) -> Switch:
    """With both values: the default, and what :meth:`DRMConfig.published` sets."""
    notes, published = DRMConfig(), DRMConfig().published()
    return replace(row, values=(getattr(notes, row.name), getattr(published, row.name)))


SWITCHES: Mapping[str, Switch] = {row.name: _valued(row) for row in _ROWS}
"""All of them by name."""


def switches(*names: str) -> tuple[Switch, ...]:
    """Some of them, in this order."""
    return tuple(SWITCHES[name] for name in names)
