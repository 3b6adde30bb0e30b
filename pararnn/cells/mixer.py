"""The base class of mixers: cells that are linear in their state, and the layers that run them."""

from __future__ import annotations

import math
import warnings
from typing import Any, cast

import sympy
import torch
from torch import Tensor, nn
from torch.nn import functional

from .. import _checks as checks
from .._checks import FOREVER
from ..solvers import decode, solve
from ..spec import Spec, exp, log1p, softplus
from .cell import Cell
from .entry import entered, takes_run

DECAYS = (None, "fixed", "learnable")


def checked_decay(decay: object, rate: object, log1p_delta: bool) -> None:
    """Raise a ``ValueError`` unless these are a kind of decay and a positive, finite rate, or no
    decay and nothing that needs one."""
    checks.one_of("decay", decay, DECAYS)
    if decay is None:
        for name, value, default in (
            ("decay_rate", rate, None),
            ("log1p_delta", log1p_delta, False),
        ):
            if value is not default:
                raise ValueError(
                    f"{name}: got {value!r}, expected none without a decay; leave it out, or give "
                    "decay='fixed' or 'learnable'."
                )
        return
    if rate is None:
        return
    number = isinstance(rate, int | float) and not isinstance(rate, bool)
    limits = torch.finfo(torch.float32)
    if not number or not limits.tiny <= rate <= limits.max:  # type: ignore[operator]
        raise ValueError(
            f"decay_rate: got {rate!r}, expected a positive number that float32 can hold."
        )


def decay_stage(
    s: Spec, decay: str | None, log1p_delta: bool, axes: tuple[str, ...] | None = None
) -> sympy.Expr | int:
    r"""Declare the time gap and the stage ``\gamma = exp(-\lambda f(\Delta t))`` in an open Spec.

    ``\lambda`` is a constant, or ``softplus(\rho)`` with one ``\rho`` a channel; ``f`` is the
    identity or ``log1p``. Without a decay it declares nothing and returns 1. ``axes`` are those of
    ``\rho``, if not the state's.
    """
    if decay is None:
        return 1
    if decay == "fixed":
        (rate,) = s.constants("rate", axes=())
    else:
        (rho,) = s.params("rho", axes=axes)
        rate = softplus(rho)
    dt = s.time_gap("dt")
    return s.let("gamma", exp(-(rate * (log1p(dt) if log1p_delta else dt))))


def faded(gamma: sympy.Expr | int, transition: sympy.Expr) -> sympy.Expr:
    """The transition times the decay."""
    return transition if gamma == 1 else gamma * transition


class Mixer(Cell):
    """A cell ``h_t = A_t h_{t-1} + b_t`` whose ``A_t`` and ``b_t`` depend on the input alone.

    Called on a sequence it is a layer: :meth:`forward` maps ``(B, T, d_in)`` to ``(B, T, d_h)``,
    all steps at once, and :meth:`stream` takes one step. :meth:`~pararnn.Cell.step` and the
    solver are those of any cell. The public state is flat, ``(B, 1, W)``: all slots one after the
    other.

    Under autocast a mixer computes in the dtype of its parameters, as norms do, and rounds its
    output: errors of gates and angles would add up over a sequence.

    A subclass writes :meth:`make_spec` and ``recurrence``.

    Parameters
    ----------
    d_in, d_h
        Input and output width; also by ``input_size`` and ``hidden_size``.
    bias
        Whether the input heads have biases.
    decay
        Multiplies the transition by ``exp(-λ f(Δt))`` at every step: None, ``'fixed'``
        (``λ = decay_rate``) or ``'learnable'`` (one trained ``λ`` a channel, starting there).
    decay_rate
        ``λ``, or where it starts; positive. With a decay it is 1 if not given.
    log1p_delta
        Whether ``f`` is ``log1p`` instead of the identity. Without a decay neither of the two is
        taken.
    device, dtype
        As for :class:`torch.nn.Linear`.

    Raises
    ------
    TypeError, ValueError
        If a width is missing or does not fit, or an argument of the decay is none.
    """

    rho: nn.Parameter

    exact_drives = True

    def __init__(
        self,
        d_in: int | None = None,
        d_h: int | None = None,
        bias: bool = True,
        *,
        decay: str | None = None,
        decay_rate: float | None = None,
        log1p_delta: bool = False,
        **kwargs: Any,
    ):
        self.log1p_delta = checks.flag("log1p_delta", log1p_delta)
        checked_decay(decay, decay_rate, log1p_delta)
        if decay is not None and decay_rate is None:
            decay_rate = 1.0
        self.decay, self.decay_rate = decay, decay_rate
        self._warned = False
        super().__init__(d_in, d_h, spec=self.make_spec(), bias=bias, **kwargs)

    def make_spec(self) -> Spec:
        """The Spec, from the attributes that are set before this constructor is called."""
        raise NotImplementedError(f"{type(self).__name__}.make_spec() is not written.")

    # -- parameters ----------------------------------------------------------------------------

    def constants(self) -> dict[str, Any]:
        return {"rate": self.decay_rate} if self.decay == "fixed" else {}

    def reset_parameters(self) -> None:
        """Every input head as a fresh :class:`torch.nn.Linear` of its own, in the order of the
        drives; the rate of a learnable decay to ``decay_rate``."""
        weight, bias = self.in_proj.weight, self.in_proj.bias
        bound = self.d_in**-0.5
        first = 0
        for shape in self.spec.drive_shapes(self.sizes)[: len(self.spec.projected)]:
            rows = slice(first, first + math.prod(shape))
            nn.init.kaiming_uniform_(weight[rows], a=math.sqrt(5))
            if bias is not None:
                nn.init.uniform_(bias[rows], -bound, bound)
            first = rows.stop
        if self.decay == "learnable":
            # The inverse of softplus; log(expm1(λ)) would overflow.
            rate = cast(float, self.decay_rate)
            nn.init.constant_(self.rho, rate + math.log(-math.expm1(-rate)))

    def hyperparameters(self) -> dict[str, Any]:
        return {
            "d_in": self.d_in,
            "d_h": self.d_h,
            "bias": self.has_bias,
            "decay": self.decay,
            "decay_rate": self.decay_rate,
            "log1p_delta": self.log1p_delta,
        }

    # -- pieces of hand-written recurrences ----------------------------------------------------

    def apart(self, given: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor | float]:
        """What a recurrence is given besides the state, without what belongs to the decay; and
        ``γ``, which without a decay is 1. The gap comes before all constants, the rate after."""
        if self.decay is None:
            return given, 1.0
        count = len(self.spec.projected)
        dt, rate = given[count], given[-1]
        if self.decay == "learnable":
            rate = functional.softplus(rate, threshold=40)
        gap = torch.log1p(dt) if self.log1p_delta else dt
        return given[:count] + given[count + 1 : -1], torch.exp(-(rate * gap[..., None]))

    # -- states --------------------------------------------------------------------------------

    @property
    def flat_width(self) -> int:
        """Width ``W`` of the flat state."""
        return math.prod(self.state_shape)

    def flat(self, state: Tensor) -> Tensor:
        """A state ``(..., *state_shape)`` as ``(..., W)``."""
        return state.flatten(-len(self.state_shape)) if len(self.state_shape) > 1 else state

    def unflat(self, h: Tensor) -> Tensor:
        """A flat state ``(..., W)`` as ``(..., *state_shape)``."""
        return h.unflatten(-1, self.state_shape) if len(self.state_shape) > 1 else h

    def _start(self, name: str, h: Tensor | None, batch: int) -> Tensor:
        """A given state, flat or as :meth:`init_state` gives it, or that of :meth:`init_state`:
        ``(batch, *state_shape)``. What runs on it looks at its numbers."""
        if h is None:
            return self.init_state(batch)
        checks.same_device(name, checks.floating(name, h), self.device)
        width = self.flat_width
        shapes = dict.fromkeys(((batch, 1, width), (batch, width), (batch, *self.state_shape)))
        if tuple(h.shape) not in shapes:
            raise ValueError(
                f"{name}: got shape {tuple(h.shape)}, expected {' or '.join(map(str, shapes))}; nothing is broadcast, use {name}.expand(...) if all samples "
                "start alike."
            )
        allowed = (self.dtype, self.state_dtype)
        if h.dtype not in allowed:
            raise TypeError(
                f"{name}: got dtype {h.dtype}, expected {' or '.join(map(str, set(allowed)))}; "
                "convert it with .to(...)."
            )
        return self.unflat(h.reshape(batch, width).to(self.state_dtype))

    # -- time gaps -----------------------------------------------------------------------------

    def _gaps(self, delta_t: Tensor | None, lead: tuple[int, ...]) -> Tensor | None:
        """Time gaps ``lead`` or ``(*lead, 1)`` as numbers from 0 to :data:`FOREVER` and above, in
        the dtype of the state."""
        if self.spec.gap is None:
            if delta_t is not None:
                raise ValueError(
                    f"delta_t: got time gaps, expected none for a {type(self).__name__} without "
                    "decay; leave delta_t out, or build it with decay='fixed' or 'learnable'."
                )
            return None
        if delta_t is None:
            raise ValueError(
                f"delta_t: got none, expected time gaps of shape {lead}: this "
                f"{type(self).__name__} has decay={self.decay!r}."
            )
        gaps = checks.same_device("delta_t", checks.floating("delta_t", delta_t), self.device)
        if tuple(gaps.shape) not in (lead, (*lead, 1)):
            raise ValueError(
                f"delta_t: got shape {tuple(gaps.shape)}, expected {lead} or {(*lead, 1)}; nothing "
                "is broadcast."
            )
        gaps = gaps.reshape(lead)
        if not self._warned and checks.readable(gaps):
            bad = int((~(gaps >= 0) | gaps.isinf()).sum())
            if bad:
                self._warned = True
                warnings.warn(
                    f"delta_t: got {bad} gaps that are negative, infinite or NaN; NaN and negative "
                    f"ones count as 0, infinite ones as {FOREVER:.0e}. This is said once.",
                    UserWarning,
                    stacklevel=3,
                )
        gaps = torch.nan_to_num(gaps.to(self.state_dtype), nan=0.0, posinf=FOREVER, neginf=0.0)
        return gaps.clamp_min(0)

    # -- computing -----------------------------------------------------------------------------

    @takes_run
    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        h_0: Tensor | None = None,
        delta_t: Tensor | None = None,
        *,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run a sequence.

        Parameters
        ----------
        x
            Inputs ``(B, T, d_in)``.
        h_0
            State before the first step, ``(B, 1, W)`` or ``(B, W)``, or ``(B, *state_shape)`` as
            :meth:`init_state` gives it; that of :meth:`init_state` if not given.
        delta_t
            Time before every step, ``(B, T)`` or ``(B, T, 1)``: needed with a decay, and refused
            without. NaN and negative ones count as 0, infinite ones as 1e10, with one warning an
            instance (on the CPU, where looking does not mean waiting).
        return_state
            Whether to return the state after the last step, too.

        Returns
        -------
        Tensor, or tuple of two
            ``(B, T, d_h)`` in the dtype of the input projection; and ``(B, 1, W)``, in the state's
            dtype (at least float32), to continue from.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit.
        """
        start, gaps = self.given(x, h_0, delta_t)
        y, final = self._run(x, start, gaps)
        return (y, self.flat(final).unsqueeze(1)) if return_state else y

    def given(
        self, x: Tensor, h_0: Tensor | None, delta_t: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Start and time gaps of a call as :func:`~pararnn.solve` takes them, after all checks of
        :meth:`forward`."""
        if not isinstance(x, Tensor) or x.ndim != 3:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x: got {got}, expected shape (B, T, d_in).")
        batch, length = x.shape[:2]
        gaps = self._gaps(delta_t, (batch, length))
        if h_0 is None:
            return None, gaps
        start = self._start("h_0", h_0, batch)
        if checks.readable(start):  # elsewhere the solver's own check is enough
            self.check_start("h_0", start)
        return start, gaps

    def _run(self, x: Tensor, start: Tensor | None, gaps: Tensor | None) -> tuple[Tensor, Tensor]:
        """Output ``(B, T, d_h)`` and final state of a checked call; no start is the default one."""
        solution = solve(self, x, h0=start, dt=gaps)
        return solution.output.to(self.output_dtype), solution.final_state

    def stream(
        self, x_t: Tensor, h_prev: Tensor | None = None, delta_t: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One step, for streaming.

        Parameters
        ----------
        x_t
            Input ``(B, d_in)``.
        h_prev
            State ``(B, W)``, ``(B, 1, W)`` or ``(B, *state_shape)``; that of :meth:`init_state` if
            not given.
        delta_t
            Time since the step before, ``(B,)`` or ``(B, 1)``, as in :meth:`forward`.

        Returns
        -------
        y_t, h_t
            Output ``(B, d_h)``, and the new flat state ``(B, W)`` in the state's dtype.
        """
        return entered(self, self._stream, x_t, h_prev, delta_t)

    def _stream(
        self, x_t: Tensor, h_prev: Tensor | None = None, delta_t: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(x_t, Tensor) or x_t.ndim != 2:
            got = tuple(x_t.shape) if isinstance(x_t, Tensor) else type(x_t).__name__
            raise ValueError(f"x_t: got {got}, expected shape (B, d_in).")
        batch = x_t.shape[0]
        gaps = self._gaps(delta_t, (batch,))
        start = self._start("h_prev", h_prev, batch)
        self.check_state("h_prev", start)
        u = self.drives(x_t)
        h = decode(self, None, start, drives=u, dt=gaps)
        return self.output(h, drives=u).to(self.output_dtype), self.flat(h)
