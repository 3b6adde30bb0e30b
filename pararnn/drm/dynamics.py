"""The vector field that moves the state: geometry at a point, and velocities for tokens there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from .bound import bound_state, fits_dtype
from .config import DRMConfig
from .direction import DirectionField, Directions
from .flow import DirectStateTransition, DRMFlow
from .metric import Metric, RelationalMetric
from .naturalize import naturalize, naturalize_in_span
from .risk import RiskField
from .streams import stream


@dataclass(frozen=True)
class Geometry:
    """What the parts say at states ``(..., d)``; None for a part that is absent.

    Attributes
    ----------
    directions : Directions, optional
    metric : Metric, optional
    risk : Tensor, optional
        Risk mass, ``(...)``.
    """

    directions: Directions | None = None
    metric: Metric | None = None
    risk: Tensor | None = None


class DRMDynamics(nn.Module):
    """Directions and flow, or a direct transition; metric and risk, where there are any.

    Its :meth:`step` is one token of the recurrent path, so it can be given to
    :func:`pararnn.solve` as an own cell.

    Parameters
    ----------
    config
        Of the model. Each part draws from its own stream of ``config.seed``.
    layer
        0 for the dynamics of a model, else the number of a further layer: its streams differ, and
        it has no risk.
    """

    def __init__(self, config: DRMConfig, layer: int = 0):
        super().__init__()
        self.config = config
        self.state_shape = (config.d_state,)
        d, e, h = config.d_state, config.d_token, config.hidden_size
        self.direction: DirectionField | None = None
        self.flow: DRMFlow | None = None
        self.direct: DirectStateTransition | None = None
        self.metric: RelationalMetric | None = None
        self.risk: RiskField | None = None
        if config.transition == "direction":
            with stream(config.seed, "direction", layer):
                self.direction = DirectionField(
                    d,
                    config.n_directions,
                    h,
                    basis=config.direction_basis,
                    normalize=config.normalize_directions,
                    floor=config.direction_floor,
                    temperature=config.gate_temperature,
                    logit_bias=config.gate_logit_bias,
                    top_k=config.gate_top_k,
                    top_k_renormalize=config.gate_top_k_renormalize,
                    dropout=config.dropout,
                )
            with stream(config.seed, "flow", layer):
                self.flow = DRMFlow(d, e, h, config.n_directions, config.dropout)
        elif config.transition == "direct":
            with stream(config.seed, "direct", layer):
                self.direct = DirectStateTransition(
                    d, e, h, config.dropout, scale=config.direct_factor()
                )
        if config.metric:
            with stream(config.seed, "metric", layer):
                self.metric = RelationalMetric(
                    d,
                    config.metric_rank,
                    h,
                    basis=config.metric_basis,
                    eps=config.metric_eps,
                    dropout=config.dropout,
                )
        if config.risk != "absent" and not layer:
            with stream(config.seed, "risk"):
                self.risk = RiskField(config)

    @property
    def radius(self) -> float | None:
        """The radius of the state, None if it is not bounded."""
        return self.config.state_radius if self.config.bounded_state else None

    def geometry(self, z: Tensor, *, metric: bool = True) -> Geometry:
        """Directions, metric and risk at ``z (..., d)``; with ``metric=False`` the metric, if there
        is one, is not evaluated. A step size that the dtype of ``z`` does not have is an error."""
        fits_dtype("dt", self.config.dt, z.dtype)
        return Geometry(
            None if self.direction is None else self.direction(z),
            self.metric(z) if self.metric is not None and metric else None,
            self.risk(z) if self.risk is not None and self.config.risk == "enabled" else None,
        )

    def velocity(self, geometry: Geometry, z: Tensor, e: Tensor, strength: float) -> Tensor:
        """Applied velocities ``(..., m, d)`` at ``z (..., d)`` for m tokens ``e (..., m, d_token)``.

        ``geometry`` may be that of an earlier state; coefficients are those of ``z``.
        """
        c, metric = self.config, geometry.metric
        damping, precision = c.naturalization_damping, c.naturalization_precision
        if self.flow is not None and geometry.directions is not None:
            coefficients = self.flow(z, e)
            if metric is not None and c.naturalization_form != "post":
                return naturalize_in_span(
                    metric,
                    geometry.directions,
                    coefficients,
                    strength,
                    damping,
                    c.naturalization_form,
                    precision,
                )
            raw = geometry.directions.velocity(coefficients)
        elif self.direct is not None:
            raw = self.direct(z, e)
        else:
            raise ValueError("velocity: this model has transition='none', so no velocity.")
        return raw if metric is None else naturalize(metric, raw, strength, damping, precision)

    def step(self, z: Tensor, e: Tensor, strength: float | None = None) -> Tensor:
        r"""One token: \(z_{t+1} = \mathrm{Bnd}(z_t + dt\,v_t)\), ``flow_steps`` times, with fresh
        geometry each time.

        Parameters
        ----------
        z, e
            ``(B, d_state)`` and ``(B, d_token)``.
        strength
            Of naturalization; None is the configured one.

        Returns
        -------
        Tensor
            ``(B, d_state)``.
        """
        s = self.config.naturalization_strength if strength is None else strength
        return bound_state(self.unbounded_step(z, e, s), self.radius)

    def unbounded_step(self, z: Tensor, e: Tensor, strength: float) -> Tensor:
        """What :meth:`step` bounds at its end."""
        c = self.config
        for taken in range(c.flow_steps):
            z = bound_state(z, self.radius) if taken else z
            geometry = self.geometry(z, metric=strength != 0)
            v = self.velocity(geometry, z, e.unsqueeze(-2), strength).squeeze(-2)
            z = z + c.dt * v
        return z
