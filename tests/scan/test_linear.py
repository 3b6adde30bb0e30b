"""Affine scans with given operators, against loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pararnn.scan import linear_scan, matrix_affine_scan, matrix_scan, prefix_sum, reference

F64 = torch.float64
LENGTHS = (0, 1, 2, 5, 33, 101, 1031)


def _linear(g, length, dtype=F64, batch=2):
    a = 1.3 * torch.randn(batch, length, 3, 2, generator=g, dtype=F64)
    b = torch.randn(batch, length, 3, 2, generator=g, dtype=F64)
    special = torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=F64)
    pick = torch.randint(0, 40, a.shape, generator=g)
    a = torch.where(pick < 4, special[pick.clamp_max(3)], a)
    h0 = torch.randn(batch, 3, 2, generator=g, dtype=F64)
    return a.to(dtype), b.to(dtype), h0.to(dtype)


def _planar(g, length, dtype=F64, batch=2):
    m = 0.8 * torch.randn(batch, length, 3, 2, 2, generator=g, dtype=F64)
    b = torch.randn(batch, length, 3, 2, generator=g, dtype=F64)
    h0 = torch.randn(batch, 3, 2, generator=g, dtype=F64)
    return m.to(dtype), b.to(dtype), h0.to(dtype)


def _blocks(g, length, dtype=F64, batch=2):
    a = 0.5 * torch.randn(batch, length, 2, 4, 4, generator=g, dtype=F64)
    b = torch.randn(batch, length, 2, 4, 3, generator=g, dtype=F64)
    h0 = torch.randn(batch, 2, 4, 3, generator=g, dtype=F64)
    return a.to(dtype), b.to(dtype), h0.to(dtype)


KINDS = {
    "linear": (linear_scan, reference.linear, _linear),
    "planar": (matrix_scan, reference.matrix, _planar),
    "blocks": (matrix_affine_scan, reference.matrix, _blocks),
}
kinds = pytest.mark.parametrize("kind", KINDS)
directions = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


def draw(kind, length, dtype=F64, batch=2, seed=0):
    g = torch.Generator().manual_seed(seed)
    tensors = KINDS[kind][2](g, length, dtype, batch)
    return (*tensors, torch.rand(batch, length, generator=g) < 0.1)


def apply(kind, op, h):
    """Composed operators ``(B, T, ...)`` applied to one state ``(B, ...)``."""
    if kind == "linear":
        return op * h.unsqueeze(1)
    if kind == "planar":
        return torch.einsum("btnij,bnj->btni", op, h)
    return torch.einsum("btnij,bnjv->btniv", op, h)


def close(got, want, tol=1e-9):
    scale = float(want.detach().abs().max()) if want.numel() else 1.0
    torch.testing.assert_close(got.double(), want.double(), rtol=tol, atol=tol * scale)


def test_the_reference_against_numpy():
    op, b, h0, resets = draw("blocks", 6)
    h = h0.numpy()
    for t in range(6):
        h = np.where(resets[:, t].numpy()[:, None, None, None], 0.0, h)
        h = np.einsum("bnij,bnjv->bniv", op[:, t].numpy(), h) + b[:, t].numpy()
    got = reference.matrix(op, b, h0, resets=resets)
    np.testing.assert_allclose(got[:, -1].numpy(), h, rtol=1e-12)


@kinds
@directions
@pytest.mark.parametrize("length", LENGTHS)
def test_states(kind, length, reverse):
    scan, loop, _ = KINDS[kind]
    op, b, h0, resets = draw(kind, length)
    if length > 500:
        op = op / 2  # keep the comparison meaningful: no state grows beyond reason
    for start in (None, h0):
        for mask in (None, resets):
            options = {"reverse": reverse, "resets": mask}
            close(scan(op, b, start, **options), loop(op, b, start, **options))


@kinds
@directions
def test_final_state_and_chunks(kind, reverse):
    """The state that is returned goes on where the sequence was cut."""
    scan = KINDS[kind][0]
    op, b, h0, _ = draw(kind, 57)
    whole, end = scan(op, b, h0, reverse=reverse, return_state=True)
    order = (slice(20, None), slice(0, 20)) if reverse else (slice(0, 20), slice(20, None))
    state, parts = h0, {}
    for part in order:
        parts[part.start], state = scan(
            op[:, part], b[:, part], state, reverse=reverse, return_state=True
        )
    close(torch.cat([parts[0], parts[20]], 1), whole)
    close(state, end)
    empty, start = scan(op[:, :0], b[:, :0], h0, return_state=True)
    assert empty.shape == b[:, :0].shape
    assert torch.equal(start, h0)


@kinds
@directions
@pytest.mark.parametrize("length", [0, 1, 70])
def test_coefficients(kind, length, reverse):
    scan, loop, _ = KINDS[kind]
    op, b, h0, resets = draw(kind, length)
    for mask in (None, resets):
        options = {"reverse": reverse, "resets": mask}
        composed, forced = scan(op, b, coefficients=True, **options)
        assert composed.shape == op.shape
        assert forced.shape == b.shape
        close(apply(kind, composed, h0) + forced, loop(op, b, h0, **options))


@kinds
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_accumulated_in_float32(kind, dtype):
    scan, loop, _ = KINDS[kind]
    op, b, h0, _ = draw(kind, 300, dtype)
    op = op / 2
    got, state = scan(op, b, h0, return_state=True)
    want = loop(op, b, h0)
    assert got.dtype == dtype
    assert state.dtype == torch.float32
    # Rounded once: at most one ulp from the rounded result, where float32 itself is accurate.
    ulp = torch.finfo(dtype).eps * want.abs() + 1e-5 * want.abs().max()
    assert bool(((got.double() - want).abs() <= ulp).all())
    close(state, want[:, -1], 1e-5)


@kinds
def test_dtypes_promote(kind):
    scan = KINDS[kind][0]
    op, b, h0, _ = draw(kind, 5)
    assert scan(op.float(), b.bfloat16()).dtype == torch.float32
    assert scan(op.bfloat16(), b.float()).dtype == torch.float32
    assert scan(op.half(), b.half(), h0.float()).dtype == torch.float16
    states, state = scan(op.float(), b.float(), h0, return_state=True)
    assert (states.dtype, state.dtype) == (torch.float32, torch.float64)


@kinds
@directions
def test_strides(kind, reverse):
    scan = KINDS[kind][0]
    op, b, h0, _ = draw(kind, 83)
    want = scan(op, b, h0, reverse=reverse)
    wide = torch.full((2, 167, *op.shape[2:]), torch.nan, dtype=F64)
    wide[:, 1::2] = op
    swapped = b.transpose(1, -1).contiguous().transpose(1, -1)
    assert torch.equal(scan(wide[:, 1::2], swapped, h0, reverse=reverse), want)
    shared = op[:1, :1].expand_as(op)
    close(scan(shared, b, h0), scan(shared.clone(), b, h0), 1e-15)


@kinds
def test_no_batch(kind):
    scan = KINDS[kind][0]
    op, b, h0, resets = draw(kind, 50, batch=0)
    assert scan(op, b, h0, resets=resets).shape == b.shape
    assert scan(op, b, coefficients=True)[0].shape == op.shape


def test_any_trailing_shape():
    g = torch.Generator().manual_seed(0)
    for rest in ((), (1,), (2, 1, 3)):
        a, b = torch.randn(2, 2, 40, *rest, generator=g, dtype=F64)
        close(linear_scan(a, b), reference.linear(a, b))


def test_special_coefficients_are_exact():
    """0 forgets, 1 sums, −1 alternates: small whole numbers have no rounding."""
    b = torch.arange(1.0, 1001.0).reshape(1, -1, 1)
    assert torch.equal(linear_scan(torch.zeros_like(b), b), b)
    assert torch.equal(linear_scan(torch.ones_like(b), b), b.cumsum(1))
    alternating = linear_scan(-torch.ones_like(b), torch.ones_like(b))
    assert torch.equal(alternating, (torch.arange(1, 1001) % 2).reshape(1, -1, 1).float())


@pytest.mark.parametrize("reset", [False, True])
def test_growth_beyond_the_dtype_between_zeros(reset):
    """The product of the coefficients of a chunk overflows, the states do not."""
    a = torch.full((1, 3000, 2), 16.0)
    b = torch.zeros(1, 3000, 2)
    b[:, -5:] = 1.0
    resets = torch.zeros(1, 3000, dtype=torch.bool)
    if reset:
        resets[:, 1000] = True
    got = linear_scan(a, b, resets=resets)
    assert torch.equal(got.double(), reference.linear(a, b, resets=resets))


def test_growth_from_a_tiny_state():
    a = torch.full((1, 2000, 1), 1.05)
    b = torch.zeros(1, 2000, 1)
    h0 = torch.full((1, 1), 1e-30)
    want = reference.linear(a, b, h0)
    got = linear_scan(a, b, h0)
    fits = want < 3e38
    torch.testing.assert_close(got[fits].double(), want[fits], rtol=2e-4, atol=0)
    assert bool(got[~fits].isinf().all())


def test_a_nan_stays_in_its_row_and_after_its_step():
    a, b, _, _ = draw("linear", 300)
    a = a / 2
    b[0, 40, 1, 0] = torch.nan
    got = linear_scan(a, b)
    bad = got.isnan()
    assert not bad[1].any()
    assert not bad[0, :40].any()
    assert not bad[0, :, [0, 2]].any()
    assert bool(bad[0, 40, 1, 0])


@kinds
@directions
@pytest.mark.parametrize("length", [1, 3])
def test_derivatives(kind, length, reverse):
    scan = KINDS[kind][0]
    op, b, h0, resets = draw(kind, length, batch=1, seed=3)
    op, b, h0 = op[:, :, :1], b[:, :, :1], h0[:, :1]
    if kind == "blocks":
        op, b, h0 = op[..., :3, :3], b[..., :3, :2], h0[..., :3, :2]
    inputs = [x.clone().requires_grad_() for x in (op, b, h0)]

    def both(op, b, h0):
        return scan(op, b, h0, reverse=reverse, resets=resets, return_state=True)

    assert torch.autograd.gradcheck(both, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(both, inputs)


@kinds
@directions
def test_gradients_of_long_sequences(kind, reverse):
    """First and second derivatives against autograd through the loop."""
    scan, loop, _ = KINDS[kind]
    op, b, h0, resets = draw(kind, 150)
    inputs = [(op / 2).requires_grad_(), b.requires_grad_(), h0.requires_grad_()]

    def derivatives(function):
        states = function(*inputs, reverse=reverse, resets=resets)
        first = torch.autograd.grad(states.sin().sum(), inputs, create_graph=True)
        second = torch.autograd.grad(sum(f.square().sum() for f in first), inputs)
        plain = torch.autograd.grad(
            function(*inputs, reverse=reverse, resets=resets).sin().sum(), inputs
        )
        return [*first, *second, *plain]

    for got, want in zip(derivatives(scan), derivatives(loop), strict=True):
        close(got, want)


def test_gradient_of_the_coefficients():
    a, b, _, _ = draw("linear", 40)
    a = (a / 2).requires_grad_()
    composed, forced = linear_scan(a, b, coefficients=True)
    (got,) = torch.autograd.grad((composed.sum() + (forced**2).sum()), a)
    p, c, total = torch.ones_like(a[:, 0]), torch.zeros_like(b[:, 0]), 0
    for t in range(40):
        p, c = a[:, t] * p, a[:, t] * c + b[:, t]
        total = total + p.sum() + (c**2).sum()
    (want,) = torch.autograd.grad(total, a)
    close(got, want)


@kinds
def test_only_wanted_gradients(kind):
    scan = KINDS[kind][0]
    op, b, h0, _ = draw(kind, 40)
    for wanted in range(3):
        inputs = [op, b, h0]
        inputs[wanted] = inputs[wanted].clone().requires_grad_()
        (g,) = torch.autograd.grad(scan(*inputs).sum(), inputs[wanted])
        assert g.shape == inputs[wanted].shape


@kinds
def test_autocast_changes_nothing(kind):
    scan = KINDS[kind][0]
    op, b, h0, _ = draw(kind, 60, torch.float32)
    op, b, h0 = (x.requires_grad_() for x in (op, b, h0))
    want = scan(op, b, h0)
    expected = torch.autograd.grad(want.sum(), (op, b, h0))
    with torch.autocast("cpu", torch.bfloat16):
        got = scan(op, b, h0)
        grads = torch.autograd.grad(got.sum(), (op, b, h0))
    assert torch.equal(got, want)
    for g, e in zip(grads, expected, strict=True):
        assert torch.equal(g, e)


@kinds
def test_errors(kind):
    scan = KINDS[kind][0]
    op, b, h0, resets = draw(kind, 6)
    with pytest.raises(ValueError, match=r"b: got shape .* expected .*nothing is broadcast"):
        scan(op, b[:, :5])
    with pytest.raises(ValueError, match="h0: got shape"):
        scan(op, b, h0[:1])
    with pytest.raises(ValueError, match="resets: got shape"):
        scan(op, b, resets=resets[:, :3])
    with pytest.raises(TypeError, match=r"resets: got torch\.int64, expected a bool"):
        scan(op, b, resets=resets.long())
    with pytest.raises(TypeError, match="resets: got list"):
        scan(op, b, resets=[True])
    with pytest.raises(TypeError, match="expected a floating-point dtype"):
        scan(op, b.long())
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
        scan(None, b)
    with pytest.raises(ValueError, match="coefficients=True together with h0"):
        scan(op, b, h0, coefficients=True)
    with pytest.raises(ValueError, match="one device"):
        scan(op, b.to("meta"))
    with pytest.raises(ValueError, match=r"[am]: got shape"):
        scan(op[0, 0, 0], b)


def test_matrices_are_square():
    with pytest.raises(ValueError, match="a: got shape"):
        matrix_affine_scan(torch.zeros(1, 2, 3, 4, 5), torch.zeros(1, 2, 3, 4, 1))


def test_meta_tensors_have_shapes():
    a = torch.empty(2, 5, 3, device="meta")
    states, last = linear_scan(a, a, return_state=True)
    assert states.device.type == "meta"
    assert (states.shape, last.shape) == (a.shape, (2, 3))


def summed(b, h0):
    """The loop in float64, from values as they are given."""
    states, h = [], h0.double()
    for b_t in b.double().unbind(1):
        h = h + b_t
        states.append(h)
    return torch.stack(states, 1) if states else b.double()


@pytest.mark.parametrize("length", LENGTHS)
def test_prefix_sums(length):
    _, b, h0 = _linear(torch.Generator().manual_seed(4), length)
    close(prefix_sum(b, h0), summed(b, h0), 1e-14)
    close(prefix_sum(b, h0), linear_scan(torch.ones_like(b), b, h0), 1e-13)


@pytest.mark.parametrize(
    ("b_type", "h_type"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
        (torch.float16, torch.float16),
    ],
)
def test_prefix_sums_are_within_their_bound(b_type, h_type):
    """In the wider dtype of the two; half precision is rounded once."""
    g = torch.Generator().manual_seed(5)
    b, h0 = torch.randn(3, 500, 7, generator=g).to(b_type), 9 * torch.randn(3, 7, generator=g)
    h0 = h0.to(h_type)
    got, wanted = prefix_sum(b, h0), summed(b, h0)
    dtype = torch.promote_types(b_type, h_type)
    assert got.dtype == dtype
    size = summed(b.abs(), h0.abs())
    unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    allowed = 2 * unit * torch.arange(2, 502).view(1, -1, 1) * size
    allowed += (dtype == torch.float16) * torch.finfo(dtype).eps * wanted.abs()
    assert bool(((got.double() - wanted).abs() <= allowed).all())


def test_derivatives_of_prefix_sums_in_half_precision():
    """Accumulated in float32 too, and rounded once."""
    g = torch.Generator().manual_seed(8)
    b = torch.randn(2, 90, 5, generator=g).bfloat16().requires_grad_()
    h0, bar = torch.randn(2, 5, generator=g), torch.randn(2, 90, 5, generator=g)
    (got,) = torch.autograd.grad(prefix_sum(b, h0), b, bar)
    wanted = bar.double().flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=1e-4)


def test_prefix_sums_of_a_prefix():
    """A later input changes no bit, nor does another row."""
    _, b, h0 = _linear(torch.Generator().manual_seed(6), 40, torch.float32, batch=3)
    whole = prefix_sum(b, h0)
    other = b.clone()
    other[:, 21:] = torch.nan
    assert torch.equal(prefix_sum(other, h0)[:, :21], whole[:, :21])
    other = b.clone()
    other[1] = torch.inf
    assert torch.equal(prefix_sum(other, h0)[[0, 2]], whole[[0, 2]])


def test_derivatives_of_prefix_sums():
    _, b, h0 = _linear(torch.Generator().manual_seed(7), 6)
    leaves = [b.requires_grad_(), h0.requires_grad_()]
    assert torch.autograd.gradcheck(prefix_sum, leaves)
    assert torch.autograd.gradgradcheck(lambda *v: prefix_sum(*v).square(), leaves)
    moved = torch.func.jvp(prefix_sum, (b, h0), (torch.ones_like(b), torch.ones_like(h0)))[1]
    assert torch.equal(moved, torch.arange(2, 8).view(1, -1, 1, 1).expand_as(b).double())


def test_prefix_sums_do_not_broadcast():
    b = torch.zeros(2, 5, 3)
    with pytest.raises(ValueError, match=r"prefix_sum: h0: got shape \(1, 3\), expected \(2, 3\)"):
        prefix_sum(b, torch.zeros(1, 3))
    with pytest.raises(TypeError, match="prefix_sum"):
        prefix_sum(b.long(), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="prefix_sum: backend: got 'triton'"):
        prefix_sum(b, b[:, 0], backend="triton")
