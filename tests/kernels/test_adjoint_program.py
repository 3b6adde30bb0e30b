"""The printed ``adjoint`` program against autograd through the hand-written step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pararnn.solvers.torch_backend import NAMESPACE, align
from pararnn.spec.backends import BACKENDS
from pararnn.spec.print import print_program
from pararnn.spec.program import arguments, load

SPECIMENS = ("gru_diag", "matrix_block", "lstm", "everything", "rotation", "linear_diagonal")
CELLS = ("ParaGRU[diag]", "ParaLSTM", "ParaSLSTM[sigmoid]", "ParaSLSTM[exp]", "ParaCfC[published]",
         "ParaCfC[consistent]", "ParaNLRU", "trio")  # fmt: skip
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def reduced(value, shape):
    """Sum out what was broadcast."""
    while value.ndim > len(shape):
        value = value.sum(0)
    for i, n in enumerate(shape):
        if value.shape[i] != n:
            value = value.sum(i, keepdim=True)
    return value


def run(dialect, spec, arrays):
    program = load(
        print_program(spec, "adjoint", dialect),
        NAMESPACE if dialect == "torch" else BACKENDS["float64"],
    )
    if dialect == "plain":
        arrays = [a.numpy() for a in arrays]
    return [torch.as_tensor(np.asarray(a)) for a in program(*arrays)]


def compare(spec, equation, leaves, cotangents):
    """Both dialects against autograd; every argument is broadcast to the shape of the state."""
    shape = cotangents[0].shape
    whole = [leaf.detach().expand(shape) for leaf in leaves]
    for leaf in leaves:
        leaf.requires_grad_()
    out = equation(*leaves)
    out = (out,) if isinstance(out, torch.Tensor) else out
    out = [o.expand(shape) for o in out]
    want = torch.autograd.grad(out, leaves, cotangents, materialize_grads=True)
    assert len(leaves) == len(arguments(spec))
    for dialect in ("plain", "torch"):
        kept = [a.clone() for a in (*whole, *cotangents)]
        got = run(dialect, spec, [*whole, *cotangents])
        assert len(got) == len(leaves)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(reduced(g.expand(shape), w.shape), w, **CLOSE)
        for before, after in zip(kept, (*whole, *cotangents), strict=True):
            assert torch.equal(before, after), "an argument was overwritten"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", SPECIMENS)
def test_specimens(zoo, name, seed):
    s = zoo[name]
    n, axes = len(s.spec.slots), s.spec.axes
    state, drives, params = s.inputs(5, seed=seed)
    slots = [state] if n == 1 else list(state.unbind(-len(axes) - 1))
    declared = [d.axes for d in s.spec.drive_list] + [axes] * len(s.spec.map_list)
    declared += [p.axes for p in s.spec.param_list]
    flat = [*drives, *params]
    leaves = slots + [align(v, a, axes).clone() for v, a in zip(flat, declared, strict=True)]

    def equation(*args):
        given = args[n:]
        back = [v.reshape(f.shape) for v, f in zip(given, flat, strict=True)]
        return s.equation(*args[:n], *back)

    cotangents = [torch.randn_like(slots[0]) for _ in range(n)]
    compare(s.spec, equation, leaves, cotangents)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CELLS)
def test_cells(kit, name, seed):
    case = kit.Case(name, B=5, T=1, D=3, seed=seed)
    data, s = kit.draw(case), kit.subject(name)
    u = data.u[:, 0].split(case.D, -1)
    params = [p.cpu() for p in data.params]
    slots = [h.clone() for h in data.h0.cpu().unbind(1)]
    if data.dt is None:
        leaves, equation = [*slots, *(v.cpu().clone() for v in u), *params], s.equation
    else:
        dt = data.dt.cpu().clone()  # (B, 1)
        leaves = [*slots, *(v.cpu().clone() for v in u), dt, *params]
        at = len(slots) + len(u)

        def equation(*args):
            return s.equation(*args[:at], args[at].squeeze(-1), *args[at + 1 :])

    cotangents = [torch.randn_like(slots[0]) for _ in slots]
    compare(s.spec, equation, leaves, cotangents)


def test_a_spec_that_mixes_channels_is_refused(zoo):
    for name in ("gru_head", "gru_dense", "matrix", "lstm_dense"):
        with pytest.raises(ValueError, match="channelwise"):
            print_program(zoo[name].spec, "adjoint", "triton")
