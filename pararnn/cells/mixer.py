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
from ..solvers import decode
from ..solvers.api import solve_layer
from ..spec import Spec, exp, log1p, softplus
from .cell import Cell
from .entry import entered, in_order, spelled, takes_run

SPELLINGS = {"h_0": "h0", "delta_t": "dt"}
"""Other names of the arguments of mixers as layers, and of blocks."""

DECAYS = (None, "fixed", "learnable")


def checked_decay(decay: object, rate: object, log1p_delta: bool) -> None:
    """Raise a ``ValueError`` unless these are a kind of decay and a positive, finite rate, or no
    decay and nothing that needs one."""
    checks.one_of("decay", decay, DECAYS)
    if decay is None:
        for name, value in (("decay_rate", rate), ("log1p_delta", log1p_delta or None)):
            if value is not None:
                raise ValueError(
                    f"{name}: got {value!r}, expected none without a decay; leave it out, or give "
                    "decay='fixed' or 'learnable'."
                )
    if decay is None or rate is None:
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
    solver are those of any cell. A layer's state is flat, ``(B, 1, W)``: all slots one after the
    other. That, and time gaps that are mended, is all that the layer adds to a solve; the rest is
    checked there.

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
        names = ("d_in", "d_h", "decay", "decay_rate", "log1p_delta")
        return {"bias": self.has_bias} | {name: getattr(self, name) for name in names}

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

    def _unflat(self, name: str, h: Tensor | None, batch: int) -> Tensor | None:
        """A state that is flat or as :meth:`init_state` gives it: ``(batch, *state_shape)``."""
        if h is None:
            return None
        width = self.flat_width
        shapes = dict.fromkeys(((batch, 1, width), (batch, width), (batch, *self.state_shape)))
        if tuple(checks.floating(name, h).shape) not in shapes:
            raise ValueError(
                f"{name}: got shape {tuple(h.shape)}, expected {' or '.join(map(str, shapes))}; "
                f"nothing is broadcast, use {name}.expand(...) if all samples start alike."
            )
        return self.unflat(h.reshape(batch, width))

    # -- time gaps -----------------------------------------------------------------------------

    def _gaps(self, dt: Tensor | None, dims: int) -> Tensor | None:
        """Time gaps, of ``dims`` dimensions or with one more of size 1, as numbers from 0 to
        :data:`FOREVER` and above, in the dtype of the state."""
        if (dt is None) != (self.spec.gap is None):
            got, wanted, of = (
                ("none", "time gaps", "with") if dt is None else ("time gaps", "none", "without")
            )
            raise ValueError(
                f"dt: got {got}, expected {wanted} for a {type(self).__name__} {of} decay; give dt to "
                "mixers with decay='fixed' or 'learnable', and only to them."
            )
        if dt is None:
            return None
        gaps = checks.floating("dt", dt)
        if gaps.ndim == dims + 1 and gaps.shape[-1] == 1:
            gaps = gaps.squeeze(-1)
        if not self._warned and checks.readable(gaps):
            bad = int((~(gaps >= 0) | gaps.isinf()).sum())
            if bad:
                self._warned = True
                warnings.warn(
                    f"dt: got {bad} gaps that are negative, infinite or NaN; NaN and negative ones "
                    f"count as 0, infinite ones as {FOREVER:.0e}. This is said once.",
                    UserWarning,
                    stacklevel=3,
                )
        gaps = torch.nan_to_num(gaps.to(self.state_dtype), nan=0.0, posinf=FOREVER, neginf=0.0)
        return gaps.clamp_min(0)

    # -- computing as a layer ------------------------------------------------------------------

    @takes_run
    @spelled(**SPELLINGS)
    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        h0: Tensor | None = None,
        dt: Tensor | None = None,
        *,
        resets: Tensor | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run a sequence.

        Parameters
        ----------
        x
            Inputs ``(B, T, d_in)``.
        h0
            State before the first step, ``(B, 1, W)`` or ``(B, W)``, or ``(B, *state_shape)`` as
            :meth:`init_state` gives it; that of :meth:`init_state` if not given. Also by ``h_0``.
        dt
            Time before every step, ``(B, T)`` or ``(B, T, 1)``: needed with a decay, and refused
            without. NaN and negative ones count as 0, infinite ones as 1e10, with one warning an
            instance (on the CPU, where looking does not mean waiting). Also by ``delta_t``.
        resets
            Bool mask ``(B, T)``: where True, the step starts from the zero state, also if
            :meth:`init_state` is another.
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
        start, gaps = self.given(x, h0, dt)
        solution = solve_layer(self, x, h0=start, dt=gaps, resets=resets)
        y = solution.output.to(self.output_dtype)
        return (y, self.flat(solution.final_state).unsqueeze(1)) if return_state else y

    def given(
        self, x: Tensor, h: Tensor | None, dt: Tensor | None, *, steps: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """State and time gaps of a call as :func:`~pararnn.solve` (without ``steps``: a single step)
        takes them, which checks the rest."""
        name, lead, dims = ("h0", 2, "(B, T, d_in)") if steps else ("h", 1, "(B, d_in)")
        checks.trailing("x", checks.floating("x", x), (self.d_in,), lead, f"that it is {dims}")
        return self._unflat(name, h, x.shape[0]), self._gaps(dt, lead)

    @spelled(x_t="x", h_prev="h", delta_t="dt")
    def stream(
        self, x: Tensor, h: Tensor | None = None, dt: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One step, for streaming.

        Like :meth:`forward` it takes the input first; :meth:`~pararnn.Cell.step` is the recurrence
        and takes the state first.

        Parameters
        ----------
        x
            Input ``(B, d_in)``. Also by ``x_t``.
        h
            State ``(B, W)``, ``(B, 1, W)`` or ``(B, *state_shape)``; that of :meth:`init_state` if
            not given. Also by ``h_prev``.
        dt
            Time since the step before, ``(B,)`` or ``(B, 1)``, as in :meth:`forward`. Also by
            ``delta_t``.

        Returns
        -------
        y, h
            Output ``(B, d_h)``, and the new flat state ``(B, W)`` in the state's dtype.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit, or state and input are in the other order (where their
            shapes tell).
        """
        return entered(self, self._stream, x, h, dt)

    def _stream(
        self, x: Tensor, h: Tensor | None = None, dt: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        in_order("stream", x, h, self.d_in, self.flat_width)
        h, gaps = self.given(x, h, dt, steps=False)
        if h is None:
            h = self.init_state(x.shape[0])
        elif h.dtype == self.dtype:
            h = h.to(self.state_dtype)
        u = self.drives(x)
        h = decode(self, None, h, drives=u, dt=gaps)
        return self.output(h, drives=u).to(self.output_dtype), self.flat(h)
