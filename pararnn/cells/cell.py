"""The base class of all cells: a Spec, its parameters, and a hand-written step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from .. import _checks as checks
from .._precision import exactly
from ..solvers.module_recurrence import computed_weights
from ..solvers.operator import register
from ..solvers.recurrence import pack
from ..solvers.spec_recurrence import SpecRecurrence
from ..spec import Spec
from .entry import takes_run
from .facts import Facts
from .rebuild import constructor_arguments, lost


class Registered:
    """The facts of a registered class, read when they are asked for; None of any other."""

    def __get__(self, cell: Cell | None, kind: type[Cell]) -> Facts | None:
        from .registry import facts_of

        return facts_of(kind)


class Cell(nn.Module):
    """A recurrence ``h_t = f(h_{t-1}, u_t)`` with drives ``u_t`` affine in the input ``x_t``.

    A subclass sets ``spec`` and, as an independent second source of the same equation, writes
    :meth:`recurrence` in plain PyTorch. Without it the step is derived from the Spec.

    Parameters
    ----------
    d_in, d_h
        Width of the input and of a vector state; also by ``input_size`` and ``hidden_size``.
    spec
        The Spec, if it is not a class attribute.
    sizes
        Size of every state axis (``{"K": 64, "V": 16}``), instead of ``d_h``. A ``head`` map
        needs the entry ``"heads"``, which must divide the width.
    bias
        Whether the input projection has a bias.
    device, dtype
        Where and in which floating-point dtype the parameters live.

    Attributes
    ----------
    in_proj : torch.nn.Linear
        ``d_in → C``: all drives of a step, packed in the Spec's order.
    d_h : int
        Width of what a layer passes on; ``channels`` is that of one slot.

    Raises
    ------
    TypeError, ValueError
        If a width is missing, not a positive integer, or not divisible by the number of heads, or
        if the dtype is not floating-point.
    """

    spec: Spec
    sizes: dict[str, int]
    facts: ClassVar[Facts | None] = cast(Any, Registered())  # a class may set its own
    starts_at_zero: ClassVar[bool] = True
    """Whether :meth:`init_state` is the zero state, without gradients."""
    exact_drives: ClassVar[bool] = False
    """Whether drives are computed in the dtype of the parameters under autocast, too."""
    direct: ClassVar[bool] = False
    """Whether :meth:`through` gives a layer's output without the states in between."""
    recurrence: ClassVar[Callable[..., Any] | None] = None
    """Hand-written ``recurrence(self, *slots, *drives, *maps, *params)``, in the order of the
    Spec; a time gap is the last drive. Tensors may have leading dimensions. Returns the next state
    (a tuple if S > 1)."""

    def __init__(
        self,
        d_in: int | None = None,
        d_h: int | None = None,
        *,
        spec: Spec | None = None,
        sizes: Mapping[str, int] | None = None,
        input_size: int | None = None,
        hidden_size: int | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: Any,
    ):
        super().__init__()
        if unknown:
            raise TypeError(
                f"{type(self).__name__}: got an argument {next(iter(unknown))!r} that it does not "
                "take; leave it out."
            )
        if spec is not None:
            self.spec = spec
        elif not isinstance(getattr(self, "spec", None), Spec):
            raise TypeError(
                f"{type(self).__name__} has no Spec; set the class attribute 'spec' or pass spec=…"
            )
        checks.flag("bias", bias)
        checks.parameter_dtype(dtype)
        self.d_in = self.input_size = checks.either("d_in", d_in, "input_size", input_size)
        self.sizes = dict(sizes or {})
        width = d_h if d_h is not None else hidden_size
        if len(self.spec.axes) == 1 and self.spec.axes[0] not in self.sizes:
            self.sizes[self.spec.axes[0]] = checks.either("d_h", d_h, "hidden_size", hidden_size)
        elif width is not None:
            raise TypeError(
                f"d_h: got {width}, but the sizes of the state are given by {self.sizes}; leave "
                "d_h out."
            )
        for axis in self.spec.axes:
            checks.positive(axis, self.sizes.get(axis))
        self._check_heads()
        self.state_shape = self.spec.state_shape(self.sizes)
        self.state_slots = len(self.spec.slots)
        self.channels = math.prod(self.sizes[a] for a in self.spec.axes)
        self.d_h = self.hidden_size = self._output_width()
        self.jac_structure = self.spec.jac_structure
        register(self.spec)
        self._recurrent = [m.name for m in self.spec.map_list] + [
            p.name for p in self.spec.param_list
        ]
        self.drive_width, self.has_bias = self.spec.packed_width(self.sizes), bias
        self._like = torch.empty(0, device=device, dtype=dtype)
        self.in_proj = nn.Linear(self.d_in, self.drive_width, bias=bias, device=device, dtype=dtype)
        constants = {p.name for p in self.spec.param_list if not p.trained}
        for name, shape in self.spec.parameter_shapes(self.sizes).items():
            if hasattr(self, name):
                raise ValueError(
                    f"{self.spec.name}: the parameter name {name!r} is an attribute of every cell; "
                    "rename it in the Spec."
                )
            if name not in constants:
                self.register_parameter(
                    name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                )
        self._set_constants()
        self.reset_parameters()

    def _output_width(self) -> int:
        read = self.spec.readout
        if read is not None:
            return math.prod(self.sizes[a] for a in self.spec.axes_of(read.symbol))
        return self.channels * (self.state_slots if self.spec.output == "all" else 1)

    def _check_heads(self) -> None:
        if not any(m.structure == "head" for m in self.spec.map_list):
            return
        heads = checks.positive("n_heads", self.sizes.get("heads"))
        width = self.sizes[self.spec.axes[0]]
        if width % heads:
            raise ValueError(
                f"n_heads: got {heads} heads for d_h={width}, expected a divisor of d_h; "
                f"choose n_heads or d_h so that d_h % n_heads == 0."
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register(self.spec)

    # -- parameters ----------------------------------------------------------------------------

    def constants(self) -> dict[str, Any]:
        """Values of the Spec's constants by name: numbers or lists of the shape of the axes."""
        return {}

    def _set_constants(self) -> None:
        shapes, given = self.spec.parameter_shapes(self.sizes), self.constants()
        for p in self.spec.param_list:
            if not p.trained:
                if p.name not in given:
                    raise TypeError(
                        f"{type(self).__name__}: got no value of the constant {p.name!r}, expected "
                        "one from its method constants()."
                    )
                value = torch.tensor(given[p.name], dtype=self.state_dtype, device=self.device)
                self.register_buffer(p.name, value.expand(shapes[p.name]), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Cell:
        super()._apply(fn, recurse)
        self._like = fn(self._like)
        self._set_constants()  # in the state's dtype: a conversion to half would round them
        return self

    def reset_parameters(self) -> None:
        """Input weights Kaiming-uniform (variance 1/d_in), biases 0, recurrent maps Xavier-normal,
        elementwise recurrent parameters 0.

        A diagonal map counts as the d×d matrix that it is: standard deviation 1/√d.
        """
        nn.init.kaiming_uniform_(self.in_proj.weight, nonlinearity="linear")
        if self.in_proj.bias is not None:
            nn.init.zeros_(self.in_proj.bias)
        for m in self.spec.map_list:
            weight = getattr(self, m.name)
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        for p in self.spec.param_list:
            if p.trained:
                nn.init.zeros_(getattr(self, p.name))

    def recurrent_params(self) -> tuple[Tensor, ...]:
        """Effective recurrent parameters in the Spec's order: maps, then elementwise parameters.

        Subclasses apply their constraints here; solver and step both read it. Constants are in the
        dtype of the state.
        """
        if self._forward_pre_hooks:
            computed_weights(self)
        return tuple([getattr(self, name) for name in self._recurrent])

    def hyperparameters(self) -> dict[str, Any]:
        """Constructor arguments that rebuild this cell (device and dtype apart)."""
        out: dict[str, Any] = {"d_in": self.d_in, "bias": self.has_bias}
        if "spec" in self.__dict__:
            out["spec"] = self.spec
        return out | {"sizes": dict(self.sizes)}

    def rebuilt(self, **changes: Any) -> Cell:
        """A freshly initialised cell of the same kind, with some hyperparameters changed.

        Raises
        ------
        TypeError
            If :meth:`hyperparameters` does not give all arguments of the constructor.
        ValueError
            If this cell has what a fresh one has not: parametrizations, hooks, other submodules.
        """
        settings = self.hyperparameters() | changes
        name = type(self).__name__
        fix = (
            "write a method hyperparameters() that returns every argument of the constructor but "
            "device and dtype, or build the cells yourself and pass a list of them"
        )
        forgotten = [a for a in constructor_arguments(type(self), Cell) if a not in settings]
        if forgotten:
            raise TypeError(
                f"{name}: got no {forgotten[0]!r} from hyperparameters(), expected every argument "
                f"of the constructor, so that the cell can be rebuilt as it is; {fix}."
            )
        try:
            fresh = type(self)(**settings, device=self.device, dtype=self.dtype)
        except TypeError as error:
            raise TypeError(
                f"{name}: cannot be rebuilt from hyperparameters(): {error}; {fix}."
            ) from error
        gone = lost(self, fresh)
        if gone and changes:  # which may be what makes the difference
            gone = lost(self, type(self)(**self.hyperparameters(), device=self.device))
        if gone:
            raise ValueError(
                f"{name}: got a cell with {gone}, which a fresh cell of its kind has not; build "
                "the cells yourself, each with its own, and pass a list of them."
            )
        return fresh

    def extra_repr(self) -> str:
        shown = {k: v for k, v in self.hyperparameters().items() if k not in ("bias", "spec")}
        return ", ".join(f"{k}={v!r}" for k, v in shown.items())

    # -- computing -----------------------------------------------------------------------------

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and on the device of the parameters: the first floating-point one
        of the input projection, or of the cell. What the projection is, is its own affair: wrapped,
        parametrized or quantized, it may have none."""
        for module in (self.in_proj, self):
            for p in module._parameters.values():
                if p is not None and p.is_floating_point():
                    return p
        found = (p for p in self.parameters() if p.is_floating_point())
        return next(found, self._like)

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.like.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return self.like.dtype

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype in which states are carried: at least float32."""
        return checks.state_dtype(self.dtype)

    @property
    def output_dtype(self) -> torch.dtype:
        """Dtype of what a layer passes on: that of the parameters, or of autocast."""
        like = self.like
        return checks.autocast_dtype(like.device) or like.dtype

    def init_state(self, *batch: int) -> Tensor:
        """Where a sequence starts, shape ``(*batch, *state_shape)``, in :attr:`state_dtype`: the
        zero state, if a subclass does not say otherwise (and then ``starts_at_zero`` is False)."""
        checks.batch(batch)
        return torch.zeros(*batch, *self.state_shape, device=self.device, dtype=self.state_dtype)

    def check_start(self, name: str, h: Tensor) -> None:
        """Raise if a given state is none that a sequence may start from."""

    def check_state(self, name: str, h: Tensor) -> None:
        """Raise if a state that is given to a single step can be that of no sequence. A NaN can: it
        may come from a step before."""

    def drives(self, x: Tensor) -> Tensor:
        """Packed drives ``(..., C)`` of inputs ``(..., d_in)``: one matrix product; with
        :attr:`exact_drives` not in autocast's dtype.

        Raises
        ------
        TypeError
            If ``x`` is not floating-point, or of another dtype than the parameters.
        ValueError
            If the width or the device is wrong.
        """
        like = self.like
        checks.trailing("x", checks.floating("x", x), (self.d_in,))
        checks.same_device("x", x, like.device)
        if x.dtype != like.dtype and checks.autocast_dtype(x.device) is None:
            raise TypeError(
                f"x: got dtype {x.dtype}, expected {like.dtype} as the cell's parameters; "
                "convert one of them with .to(...) or use torch.autocast."
            )
        if self.exact_drives:
            with checks.full_precision(like.device):
                return self.in_proj(x.to(like.dtype))
        return self.in_proj(x)

    def output(
        self, states: Tensor, x: Tensor | None = None, *, drives: Tensor | None = None
    ) -> Tensor:
        """What a layer passes on: ``(..., d_h)`` from new states ``(..., *state_shape)``.

        For most cells these are the states, flattened. A cell whose Spec has a read-out needs the
        input of the same steps, ``x (..., d_in)`` or ``drives (..., C)``, and gives the output in
        their dtype.
        """
        if self.spec.readout is None:
            spec = self.spec
            if self.state_slots > 1 and spec.output != "all":
                states = states.select(-len(spec.axes) - 1, -1)
            dims = len(spec.axes) + (self.state_slots > 1 and spec.output == "all")
            return states.flatten(-dims) if dims > 1 else states
        u = self.drives(x) if drives is None else drives  # type: ignore[arg-type]

        def run(states: Tensor, u: Tensor, *params: Tensor) -> tuple[Tensor]:
            return (
                SpecRecurrence(self.spec, self.sizes, params, self.state_dtype).read(states, u),
            )

        given = states.to(self.state_dtype), u, *self.recurrent_params()
        (read,) = exactly(run, u.device, *given)
        return read.flatten(u.ndim - 1).to(u.dtype)

    def through(
        self,
        drives: Tensor,
        h0: Tensor | None = None,
        *,
        resets: Tensor | None = None,
        dt: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output ``(B, T, d_h)`` and final state of a sequence, without the states in between, of a
        cell that is :attr:`direct`."""
        raise NotImplementedError(f"{type(self).__name__} forms its states: use pararnn.solve.")

    def split(self, u: Tensor) -> tuple[Tensor, ...]:
        """Views of packed drives ``(..., C)``, one a drive, each of shape ``(..., *axes)``.

        Time gaps, if packed as one more column, come last.
        """
        shapes = self.spec.drive_shapes(self.sizes)
        if self.spec.gap is not None and u.shape[-1] == self.drive_width:
            shapes = shapes[:-1]
        parts = u.split([math.prod(s) for s in shapes], dim=-1)
        return tuple(p.reshape((*u.shape[:-1], *s)) for p, s in zip(parts, shapes, strict=True))

    def step(
        self,
        h: Tensor,
        x: Tensor | None = None,
        *,
        drives: Tensor | None = None,
        dt: Tensor | None = None,
    ) -> Tensor:
        """One step of the recurrence, from the hand-written equation.

        Parameters
        ----------
        h
            Previous state, ``(B, *state_shape)``; its dtype is the parameters' or
            :attr:`state_dtype`.
        x
            Input ``(B, d_in)``; or give ``drives``, ``(B, C)``, as :meth:`drives` returns them.
        dt
            Time since the step before, ``(B,)``: needed by a cell whose Spec has a time gap.
            A negative one, or NaN, is an error on the CPU and not checked elsewhere.

        Returns
        -------
        Tensor
            Next state, in the dtype of ``h``. The computation is in :attr:`state_dtype`.

        Raises
        ------
        TypeError, ValueError
            If shapes, dtypes or devices do not fit, not exactly one of ``x`` and ``drives`` is
            given, or ``dt`` is missing or not wanted.
        """
        u, gaps = self.step_inputs(h, x, drives, dt)
        u = u if gaps is None else pack(u, gaps)
        params = tuple(p.to(self.state_dtype) for p in self.recurrent_params())

        def run(h: Tensor, u: Tensor, *params: Tensor) -> tuple[Tensor]:
            return (self.advance(h, u, params),)

        (new,) = exactly(run, h.device, h.to(self.state_dtype), u, *params)
        return new.to(h.dtype)

    def step_inputs(
        self, h: Tensor, x: Tensor | None, drives: Tensor | None, dt: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Drives and time gaps of one step, after all checks of :meth:`step`."""
        if (x is None) == (drives is None):
            raise TypeError("step: got both or neither of x and drives, expected exactly one.")
        like = self.like
        order = "the order, step(h, x), and the width that the module was built with"
        checks.trailing("h", checks.floating("h", h), self.state_shape, fix=order)
        checks.same_device("h", h, like.device)
        if h.dtype not in (like.dtype, self.state_dtype):
            raise TypeError(
                f"h: got dtype {h.dtype}, expected {like.dtype} or {self.state_dtype}; "
                "start from cell.init_state(batch)."
            )
        self.check_state("h", h)
        if x is not None:
            u = self.drives(x)
        else:
            u = checks.trailing("drives", checks.floating("drives", drives), (self.drive_width,))
        lead = h.shape[: h.ndim - len(self.state_shape)]
        if u.shape[:-1] != lead:
            raise ValueError(
                f"h and input: got batch shapes {tuple(lead)} and {tuple(u.shape[:-1])}, expected "
                "equal ones; nothing is broadcast, expand explicitly."
            )
        gaps = checks.time_gaps(self, dt, tuple(lead))
        return u, gaps

    def advance(self, h: Tensor, u: Tensor, params: tuple[Tensor, ...]) -> Tensor:
        """:meth:`step` without its checks: state and parameters already in the state's dtype,
        time gaps packed as the last column of ``u``."""
        slots = (h,) if self.state_slots == 1 else h.unbind(-len(self.spec.axes) - 1)
        drives = self.split(u.to(h.dtype))
        if self.recurrence is not None:
            out = self.recurrence(*slots, *drives, *params)
            following = (out,) if isinstance(out, Tensor) else tuple(out)
        else:
            derived = SpecRecurrence(self.spec, self.sizes, params, h.dtype)
            return derived.step(h, u)
        if len(following) != len(slots) or any(f.shape != slots[0].shape for f in following):
            raise ValueError(
                f"{type(self).__name__}.recurrence: got next slots of shapes "
                f"{[tuple(f.shape) for f in following]}, expected {len(slots)} of shape "
                f"{tuple(slots[0].shape)}; nothing is broadcast."
            )
        return following[0] if len(slots) == 1 else torch.stack(following, -len(self.spec.axes) - 1)

    @takes_run
    def forward(self, h: Tensor, x: Tensor, dt: Tensor | None = None) -> Tensor:
        """Same as :meth:`step`. A layer calls its cell, too: once a sequence, for all steps, so that
        the hooks of the cell act once."""
        return self.step(h, x, dt=dt)
