"""Preconditioning against dense float64 solves."""

from __future__ import annotations

import mpmath
import pytest
import torch

from pararnn.drm import Directions, Metric, naturalize, naturalize_in_span, solve_metric
from pararnn.drm.naturalize import cholesky, solve_low_rank, solve_spd

EYE = torch.eye(9, dtype=torch.float64)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def metric(*lead, d=9, r=4, scale=1.0, dtype=torch.float64):
    """Rounded to ``dtype``, so that an oracle in float64 solves the same system."""
    diagonal, factor = 0.1 + normal(*lead, d).square(), scale * normal(*lead, d, r, seed=1)
    return Metric(diagonal.to(dtype), factor.to(dtype))


def dense_solve(g, v, damping):
    wide = Metric(g.diagonal.double(), g.factor.double()).dense() + damping * torch.eye(
        v.shape[-1], dtype=torch.float64
    )
    return torch.linalg.solve(wide, v.double().mT).mT


def error(found, want):
    return float(torch.linalg.norm(found.double() - want) / torch.linalg.norm(want))


@pytest.mark.parametrize("precision", ["safe", "single", "published"])
@pytest.mark.parametrize("rank", [0, 1, 4, 13])
@pytest.mark.parametrize("damping", [0.0, 0.3])
def test_dense(precision, rank, damping):
    g, v = metric(2, 3, r=rank), normal(2, 3, 5, 9, seed=2)
    found = solve_metric(g, v, damping, precision)
    torch.testing.assert_close(found, dense_solve(g, v, damping), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("inside", [False, True])
def test_conditions(scale, inside):
    """Single precision over condition numbers up to 1e8; v anywhere, or in the span of U, where
    the terms of the identity cancel."""
    g = metric(6, d=41, r=5, scale=scale, dtype=torch.float32)
    v = normal(6, 2, 41, seed=2)
    if inside:
        v = normal(6, 2, 5, seed=2) @ g.factor.double().mT
    v = v.float()
    want = dense_solve(g, v, 0.3)
    wide = g.dense().double() + 0.3 * torch.eye(41, dtype=torch.float64)
    condition = float(torch.linalg.cond(wide).max())
    assert error(solve_metric(g, v, 0.3), want) < 1.2e-7  # one rounding, whatever the condition
    assert error(solve_metric(g, v, 0.3, "single"), want) < 8 * 6e-8 * (1 + condition)


def test_half_precision_is_rounded_once():
    g = metric(6, d=41, r=5, scale=10.0, dtype=torch.bfloat16)
    v = (normal(6, 2, 5, seed=2) @ g.factor.double().mT).bfloat16()
    want = dense_solve(g, v, 0.3)
    found = solve_metric(g, v, 0.3)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, want.bfloat16(), rtol=0, atol=0)
    late = solve_metric(g, v, 0.3, "published")
    assert late.dtype == torch.bfloat16
    assert late.isfinite().all()
    assert error(late, want) > 0.1  # which is why it is not the default


def test_several_vectors_share_one_factor():
    g, v = metric(3), normal(3, 5, 9, seed=2)
    alone = torch.cat([solve_metric(g, v[:, i : i + 1], 0.3) for i in range(5)], 1)
    torch.testing.assert_close(solve_metric(g, v, 0.3), alone, rtol=1e-13, atol=1e-14)


def test_strength():
    g, v = metric(2), normal(2, 3, 9, seed=2)
    assert naturalize(g, v, 0.0, 0.3) is v
    full = naturalize(g, v, 1.0, 0.3)
    torch.testing.assert_close(full, dense_solve(g, v, 0.3))
    torch.testing.assert_close(naturalize(g, v, 0.25, 0.3), 0.75 * v + 0.25 * full)


def test_gain_is_within_its_bounds():
    """Eigenvalues of the whole map are 1 - s + s/(g + λ)."""
    g, s, damping = metric(), 0.5, 0.3
    whole = naturalize(g, EYE, s, damping)
    want = 1 - s + s / (torch.linalg.eigvalsh(g.dense()) + damping)
    torch.testing.assert_close(torch.linalg.eigvalsh(whole), want.flip(0))


def test_a_bad_state_spoils_no_other():
    g, v = metric(3), normal(3, 2, 9, seed=2)
    want = solve_metric(g, v, 0.3)
    factor = g.factor.clone()
    factor[1, 2, 0] = torch.nan
    found = solve_metric(Metric(g.diagonal, factor), v, 0.3)
    assert torch.equal(found[[0, 2]], want[[0, 2]])
    assert found[1].isnan().all()


@pytest.mark.parametrize("precision", ["safe", "single", "published"])
def test_gradients(precision):
    g, v = metric(2, r=3), normal(2, 2, 9, seed=2)

    def solved(diagonal, factor, v):
        return naturalize(Metric(diagonal, factor), v, 0.7, 0.3, precision)

    inputs = [x.clone().requires_grad_() for x in (g.diagonal, g.factor, v)]
    assert torch.autograd.gradcheck(solved, inputs)


@pytest.mark.parametrize("form", ["subspace", "orthonormal"])
def test_in_the_span(form):
    directions = Directions(normal(2, 4, 9, seed=3), torch.sigmoid(normal(2, 4, seed=4)))
    g, c = metric(2), torch.tanh(normal(2, 5, 4, seed=5))
    found = naturalize_in_span(g, directions, c, 0.6, 0.3, form)
    for i in range(2):
        rows = directions.vectors[i]
        gram = rows @ g.dense()[i] @ rows.T + 0.3 * torch.eye(4, dtype=torch.float64)
        kappa = directions.gates[i] * c[i]
        if form == "subspace":
            solved = kappa @ torch.linalg.inv(gram) @ rows
        else:
            solved = kappa @ torch.linalg.inv(torch.linalg.cholesky(gram)) @ rows
        torch.testing.assert_close(found[i], 0.4 * kappa @ rows + 0.6 * solved)
        fit = torch.linalg.lstsq(rows.T, found[i].T).solution
        torch.testing.assert_close(rows.T @ fit, found[i].T)


@pytest.mark.parametrize("form", ["subspace", "orthonormal"])
def test_repeated_directions(form):
    vectors = normal(2, 1, 9).expand(2, 4, 9)
    directions = Directions(vectors, torch.ones(2, 4, dtype=torch.float64))
    found = naturalize_in_span(metric(2), directions, normal(2, 3, 4), 1.0, 0.0, form)
    assert found.isfinite().all()


def test_post_naturalization_leaves_the_span():
    """What the notes call direction-constrained holds for the raw velocity only."""
    rows = normal(2, 9)
    v = naturalize(metric(), normal(3, 2, seed=1) @ rows, 0.5, 0.3)
    fit = torch.linalg.lstsq(rows.T, v.T).solution
    assert float((rows.T @ fit - v.T).abs().max()) > 1e-2


def test_errors():
    g, v = metric(2), normal(2, 3, 9)
    with pytest.raises(ValueError, match="precision: got 'exact'"):
        solve_metric(g, v, 0.3, "exact")
    with pytest.raises(ValueError, match=r"expected \(2, m, 9\)"):
        solve_metric(g, v[0])
    directions = Directions(normal(2, 4, 9), normal(2, 4).sigmoid())
    with pytest.raises(ValueError, match="form: got 'other'"):
        naturalize_in_span(g, directions, normal(2, 3, 4), 0.5, 0.3, "other")


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_errors_do_not_wait_for_a_strength(strength):
    g, v, c = metric(2), normal(2, 3, 9), normal(2, 3, 4)
    directions = Directions(normal(2, 4, 9), normal(2, 4).sigmoid())
    with pytest.raises(ValueError, match="form: got 'nonsense'"):
        naturalize_in_span(g, directions, c, strength, form="nonsense")
    for call, what in ((naturalize, (g, v)), (naturalize_in_span, (g, directions, c))):
        with pytest.raises(ValueError, match=r"damping: got -1\.0, expected a number ≥ 0"):
            call(*what, strength, -1.0)
        with pytest.raises(ValueError, match="precision: got 'exact'"):
            call(*what, strength, precision="exact")
    with pytest.raises(ValueError, match=r"expected \(2, m, 9\)"):
        naturalize(g, v[0], strength)


@pytest.mark.parametrize("strength", [1.5, -1.0, torch.nan, torch.tensor(1.5)])
def test_strength_is_a_share(strength):
    g, v = metric(2), normal(2, 3, 9)
    directions = Directions(normal(2, 4, 9), normal(2, 4).sigmoid())
    with pytest.raises(ValueError, match=r"strength: got .*, expected a number from 0"):
        naturalize(g, v, strength)
    with pytest.raises(ValueError, match=r"strength: got .*, expected a number from 0"):
        naturalize_in_span(g, directions, normal(2, 3, 4), strength)


@pytest.mark.parametrize("damping", [-1.0, torch.nan, torch.tensor([0.1, -1e-9])])
def test_damping_is_not_negative(damping):
    with pytest.raises(ValueError, match=r"damping: got .*, expected a number ≥ 0"):
        solve_metric(metric(2, d=2), normal(2, 3, 2), damping)


def test_a_mapped_tensor_is_not_looked_at():
    g, v = metric(2), normal(2, 3, 9)
    found = torch.func.vmap(lambda s: solve_metric(g, v, s))(
        torch.tensor([0.1, 0.7], dtype=torch.float64)
    )
    torch.testing.assert_close(found[1], dense_solve(g, v, 0.7), rtol=1e-10, atol=1e-12)


def test_no_factor_is_nan():
    good, bad = EYE[:3, :3], -EYE[:3, :3]
    found = cholesky(torch.stack([good, bad]))
    assert torch.equal(found[0], good)
    assert found[1].isnan().all()


@pytest.mark.parametrize("form", ["post", "subspace", "orthonormal"])
@pytest.mark.parametrize("damping", [0.3, 0.0])
@pytest.mark.parametrize("apart", [1e-3, 1e-8, 0.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_directions_that_coincide(form, damping, apart, dtype):
    """Velocities and all their gradients are those of dense matrices in float64, also where two
    directions nearly agree, two agree and one vanishes."""
    vectors = torch.nn.functional.normalize(normal(5, 9, seed=3), dim=-1)
    vectors[1] = vectors[0] + apart * normal(9, seed=4)
    vectors[4], vectors[2] = vectors[0], 0.0
    given = (
        vectors,
        normal(5, seed=5).sigmoid(),
        normal(2, 5, seed=6).tanh(),
        0.5 + normal(9, seed=7).square(),
        normal(9, 3, seed=8),
    )
    leaves = [x.to(dtype).requires_grad_() for x in given]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    cotangent = normal(2, 9, seed=9).to(dtype)

    directions, g = Directions(*leaves[:2]), Metric(*leaves[3:])
    if form == "post":
        found = naturalize(g, directions.velocity(leaves[2]), 0.6, damping)
    else:
        found = naturalize_in_span(g, directions, leaves[2], 0.6, damping, form)
    slopes = torch.autograd.grad(found, leaves, cotangent)

    v, gates, c, d, u = wide
    kappa, dense = gates * c, torch.diag(d) + u @ u.T
    gram = v @ dense @ v.T + max(damping, 1e-6) * torch.eye(5, dtype=torch.float64)
    if form == "post":
        solved = torch.linalg.solve(dense + damping * EYE, (kappa @ v).T).T
    elif form == "subspace":
        solved = torch.linalg.solve(gram, kappa.T).T @ v
    else:
        solved = kappa @ torch.linalg.inv(torch.linalg.cholesky(gram)) @ v
    wanted = 0.4 * kappa @ v + 0.6 * solved
    # Rounding of the result, and that of the two float64 solutions where the damping is 1e-6.
    tolerance = 8 * torch.finfo(dtype).eps + (1e-13 if damping else 1e-6)
    assert error(found.detach(), wanted.detach()) < tolerance
    of_wide = torch.autograd.grad(wanted, wide, cotangent.double())
    for name, a, b in zip(("V", "gates", "c", "D", "U"), slopes, of_wide, strict=True):
        assert a.isfinite().all(), name
        assert error(a, b) < 4 * tolerance, name


def gamma(k, unit=2.0**-53):
    return k * unit / (1 - k * unit)


@pytest.mark.parametrize("form", ["post", "subspace"])
@pytest.mark.parametrize("rank", [2, 4, 9])
@pytest.mark.parametrize("size", [1.0, 1e6, 1e9, 1e12, 3e16, 1e20, 1e100])
def test_there_is_a_factor_as_long_as_digits_last(form, rank, size):
    """Against 200 digits. Where the least eigenvalue of the matrix with a diagonal of ones is above Demmel's
    threshold, there is a factor, and solutions are within his bound; NaN is found nowhere else.

    The factor ends with a relative error of n γ(3n+1) κ/(1 − γ(n+1)), κ of the scaled matrix, in the norm of the
    scaled solution (Higham, theorem 10.4 and section 10.1)."""
    large = normal(9, seed=11) > 0
    diagonal = torch.where(large, size * normal(9, seed=12).abs(), 1e-4) + 0.3
    factor = size * normal(9, rank, seed=13)
    if form == "post":
        scaled = factor / diagonal.unsqueeze(-1)
        matrix = factor.T @ scaled + torch.eye(rank, dtype=torch.float64)
    else:
        vectors = torch.nn.functional.normalize(normal(5, 9, seed=14), dim=-1)
        matrix = Metric(diagonal, factor).coupling(vectors)
        matrix = (matrix + matrix.T) / 2 + 0.3 * torch.eye(5, dtype=torch.float64)
    n = matrix.shape[0]
    right = normal(1, n, seed=15)
    found = solve_spd(matrix, right)[0]
    with mpmath.workdps(200):
        exact = mpmath.matrix(matrix.tolist())
        root = [mpmath.sqrt(exact[i, i]) for i in range(n)]
        unit = mpmath.matrix(n, n)
        for i in range(n):
            for j in range(n):
                unit[i, j] = exact[i, j] / (root[i] * root[j])
        values = sorted(mpmath.eigsy(unit, eigvals_only=True))
        least, condition = float(values[0]), float(values[-1] / values[0])
        if found.isnan().any():
            assert least <= n * gamma(n + 1) / (1 - gamma(n + 1))
            assert size > 1e8
            return
        if least <= n * gamma(n + 1) / (1 - gamma(n + 1)):
            return  # nothing is said
        want = mpmath.lu_solve(exact, mpmath.matrix(right[0].tolist()))
        wrong = mpmath.norm([root[i] * (float(found[i]) - want[i]) for i in range(n)])
        whole = mpmath.norm([root[i] * want[i] for i in range(n)])
        slack = n * gamma(3 * n + 1) / (1 - gamma(n + 1)) * condition
        # The bound is on the error over the norm of what was found, of which that of the solution is
        # no less than 1 - slack.
        assert slack >= 1 or float(wrong / whole) <= slack / (1 - slack)


def scaled_condition(matrix):
    """Of a symmetric matrix of mpmath, scaled to a diagonal of ones."""
    n = matrix.rows
    root = [mpmath.sqrt(matrix[i, i]) for i in range(n)]
    unit = mpmath.matrix(n, n)
    for i in range(n):
        for j in range(n):
            unit[i, j] = matrix[i, j] / (root[i] * root[j])
    values = sorted(mpmath.eigsy(unit, eigvals_only=True))
    return values[-1] / values[0]


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("size", [1.0, 1e6, 1e12, 3e16, 1e20, 1e37, 1e100, 1e150])
def test_a_large_term_of_low_rank(size, rank):
    """Against 700 digits, as large as float64 has the squares of.

    To first order in u each of the two factors has a backward error of 2 n γ(n+1) in the norm of its scaled
    matrix, which its condition κ enlarges; the second one acts on what the first one made, and the difference
    that remains is smaller than its terms by ρ. So the relative error is within 16 (n + r)² u κ_A κ_I ρ in the
    norm of :math:`L^\\top x`; the test is about sizes at which that leaves 6 digits."""
    large = normal(9, seed=11) > 0
    diagonal = torch.where(large, size * normal(9, seed=12).abs(), 1e-4) + 0.3
    vectors = torch.nn.functional.normalize(normal(4, 9, seed=14), dim=-1)
    columns = vectors @ (size * normal(9, rank, seed=13))
    matrix = Metric(diagonal, torch.zeros(9, 0).double()).coupling(vectors)
    matrix = (matrix + matrix.T) / 2 + 0.3 * torch.eye(4, dtype=torch.float64)
    right = normal(1, 4, seed=15)
    found = solve_low_rank(matrix, columns, right)[0]
    with mpmath.workdps(700):
        a, w = mpmath.matrix(matrix.tolist()), mpmath.matrix(columns.tolist())
        b = mpmath.matrix(right[0].tolist())
        root = mpmath.cholesky(a)
        y, half = mpmath.lu_solve(root, w[:, 0]), mpmath.lu_solve(root, b)
        ys = mpmath.matrix(4, rank)
        for k in range(rank):
            y = mpmath.lu_solve(root, w[:, k])
            for i in range(4):
                ys[i, k] = y[i]
        inner = ys.T * ys + mpmath.eye(rank)
        want = mpmath.lu_solve(a + w * w.T, b)
        whole = root.T * want
        wrong = root.T * (mpmath.matrix(found.tolist()) - want)
        rho = mpmath.norm(half) / mpmath.norm(whole)
        slack = (
            16 * (4 + rank) ** 2 * 2.0**-53 * scaled_condition(a) * scaled_condition(inner) * rho
        )
        assert float(slack) < 1e-6
        assert float(mpmath.norm(wrong) / mpmath.norm(whole)) <= float(slack)


@pytest.mark.parametrize("size", [3e16, 1e30, 1e100])
def test_velocities_in_the_span_at_large_states(size):
    """And their gradients: the sum of both terms has no factor there."""
    diagonal = torch.tensor([size] * 6 + [1e-4] * 3, dtype=torch.float64)
    g = Metric(diagonal.requires_grad_(), (size * normal(9, 2)).requires_grad_())
    directions = Directions(
        torch.nn.functional.normalize(normal(5, 9, seed=3), dim=-1), normal(5).sigmoid()
    )
    whole = g.coupling(directions.vectors) + 0.3 * torch.eye(5, dtype=torch.float64)
    assert cholesky((whole + whole.T) / 2).isnan().all()
    found = naturalize_in_span(g, directions, normal(3, 5), 1.0, 0.3, "subspace")
    assert found.isfinite().all()
    for grad in torch.autograd.grad(found.sum(), (g.diagonal, g.factor)):
        assert grad.isfinite().all()
