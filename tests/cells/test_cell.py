"""What every cell has in common."""

from __future__ import annotations

import copy
import io
import pickle
import re
from pathlib import Path

import pytest
import torch

import pararnn
from pararnn import (
    Cell,
    ParaGRU,
    ParaLSTM,
    ParaM2RNN,
    ParaNLRU,
    Spec,
    cell_names,
    get_cell,
    sequential_apply,
    solve,
    tanh,
)

CELLS = {
    "diag": lambda **kw: ParaGRU(3, 4, **kw),
    "head": lambda **kw: ParaGRU(3, 4, mix="head", n_heads=2, **kw),
    "matrix": lambda **kw: ParaM2RNN(3, 2, 5, **kw),
    "para_lstm": lambda **kw: ParaLSTM(3, 4, **kw),
    "para_nlru": lambda **kw: ParaNLRU(3, 4, **kw),
    "lstm": None,
}


@pytest.fixture(params=CELLS)
def make(request, zoo):
    if request.param == "lstm":
        return lambda **kw: Cell(3, spec=zoo["lstm"].spec, sizes={"d": 4}, **kw)
    return CELLS[request.param]


def elman():
    with Spec("Elman") as s:
        h = s.state("h", bounds=(-1, 1))
        (u,) = s.drives("u")
        w = s.map("w", structure="diagonal")
        s.next(h, tanh(w(h) + u))
    return s


def test_attributes(make):
    cell = make()
    assert cell.d_in == cell.input_size == 3
    assert cell.d_h == cell.hidden_size
    assert cell.state_slots == len(cell.spec.slots)
    shape = tuple(cell.state_shape)
    assert cell.init_state(7).shape == (7, *shape)
    assert cell.init_state(2, 3).shape == (2, 3, *shape)
    assert cell.init_state().shape == shape
    assert not cell.init_state(2).any()
    assert cell.jac_structure == cell.spec.jac_structure
    assert cell.in_proj.out_features == cell.spec.packed_width(cell.sizes)
    assert f"d_in={cell.d_in}" in repr(cell)


def test_aliases():
    assert ParaGRU(input_size=3, hidden_size=4).d_h == 4
    assert ParaGRU(3, hidden_size=4).d_h == 4
    assert ParaGRU(3, 4, input_size=3).d_in == 3
    with pytest.raises(ValueError, match="one size"):
        ParaGRU(3, 4, input_size=5)
    with pytest.raises(TypeError, match="neither"):
        ParaGRU(3)
    with pytest.raises(TypeError, match="neither"):
        ParaGRU(hidden_size=4)


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "4"])
def test_sizes_are_positive_integers(bad):
    for build in (
        lambda: ParaGRU(bad, 4),
        lambda: ParaGRU(3, bad),
        lambda: ParaGRU(3, 4, mix="head", n_heads=bad),
        lambda: ParaM2RNN(3, bad, 2),
        lambda: ParaM2RNN(3, 2, bad),
        lambda: ParaM2RNN(bad, 2, 2),
    ):
        with pytest.raises((TypeError, ValueError), match=r"got"):
            build()


def test_a_width_that_would_be_ignored_is_refused():
    with pytest.raises((TypeError, ValueError)):
        ParaM2RNN(8, 3, 4, d_h=99)
    with pytest.raises((TypeError, ValueError)):
        Cell(3, 8, spec=elman(), sizes={"d": 4})
    with pytest.raises((TypeError, ValueError)):
        ParaM2RNN(8, 3, 4, hidden_size=99)


def test_no_spec():
    with pytest.raises(TypeError, match="Spec"):
        Cell(3, 4)


def test_parameter_names_must_not_hide_attributes():
    with Spec("S") as s:
        h = s.state("h")
        w = s.map("sizes", structure="diagonal")
        s.next(h, w(h))
    with pytest.raises(ValueError, match="'sizes'"):
        Cell(3, 4, spec=s)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_parameters_are_floats(dtype):
    with pytest.raises(TypeError, match="floating"):
        ParaGRU(3, 4, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(make, dtype):
    for cell in (make(dtype=dtype), make().to(dtype)):
        assert {p.dtype for p in cell.parameters()} == {dtype}
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert cell.state_dtype == cell.init_state(1).dtype == wide
        x = torch.randn(2, 3, dtype=dtype)
        assert cell.step(cell.init_state(2), x).dtype == wide
        assert cell.step(cell.init_state(2).to(dtype), x).dtype == dtype
        assert cell.drives(x).dtype == dtype


def test_meta_device(make):
    cell = make(device="meta")
    assert all(p.is_meta for p in cell.parameters())
    assert cell.init_state(2).is_meta


def test_no_bias(make):
    cell = make(bias=False)
    assert cell.in_proj.bias is None
    assert torch.equal(cell.drives(torch.zeros(2, 3)), torch.zeros(2, cell.in_proj.out_features))
    assert cell.rebuilt().in_proj.bias is None
    x = torch.randn(2, 6, 3)
    torch.testing.assert_close(solve(cell, x, method="newton").states, sequential_apply(cell, x))


def test_rebuilt(make):
    cell = make().double()
    again = cell.rebuilt()
    assert type(again) is type(cell)
    assert again.hyperparameters() == cell.hyperparameters()
    assert {p.dtype for p in again.parameters()} == {torch.float64}
    assert not torch.equal(again.in_proj.weight, cell.in_proj.weight)
    assert {k: v.shape for k, v in again.state_dict().items()} == {
        k: v.shape for k, v in cell.state_dict().items()
    }
    assert cell.rebuilt(d_in=9).in_proj.in_features == 9


def test_hyperparameters_rebuild_every_option():
    cell = ParaGRU(3, 6, mix="head", n_heads=3, max_recurrent_norm=0.7, bias=False)
    again = ParaGRU(**cell.hyperparameters())
    assert (again.n_heads, again.max_recurrent_norm, again.mix) == (3, 0.7, "head")
    assert (
        ParaGRU(**ParaGRU(3, 6, max_recurrent_norm=None).hyperparameters()).max_recurrent_norm
        is None
    )


def test_state_dict(make):
    torch.manual_seed(0)
    a, b = make(), make()
    x = torch.randn(2, 9, 3)
    assert not torch.equal(sequential_apply(a, x), sequential_apply(b, x))
    buffer = io.BytesIO()
    torch.save(a.state_dict(), buffer)
    buffer.seek(0)
    b.load_state_dict(torch.load(buffer))
    assert torch.equal(sequential_apply(a, x), sequential_apply(b, x))
    assert torch.equal(solve(a, x, method="newton").states, solve(b, x, method="newton").states)


def test_copies(make):
    cell = make()
    x = torch.randn(2, 9, 3)
    want = solve(cell, x, method="newton").states
    for again in (copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))):
        assert torch.equal(solve(again, x, method="newton").states, want)
        assert torch.equal(sequential_apply(again, x), sequential_apply(cell, x))
        with torch.no_grad():
            again.in_proj.weight.zero_()
        assert torch.equal(solve(cell, x, method="newton").states, want)


def test_a_copy_shares_the_compiled_programs(make):
    """A deep copy must not print and compile everything again."""
    from pararnn.solvers.torch_backend import compiled

    cell = make()
    x = torch.randn(2, 9, 3)
    solve(cell, x, method="newton")
    before = compiled.cache_info().misses
    again = copy.deepcopy(cell)
    solve(again, x, method="newton")
    assert compiled.cache_info().misses == before


def test_step_takes_x_or_drives(make):
    cell = make()
    h, x = cell.init_state(2) + 0.1, torch.randn(2, 3)
    a, b = cell.step(h, x), cell.step(h, drives=cell.drives(x))
    assert torch.equal(a, b)
    assert torch.equal(a, cell(h, x))
    with pytest.raises(TypeError, match="exactly one"):
        cell.step(h)
    with pytest.raises(TypeError, match="exactly one"):
        cell.step(h, x, drives=cell.drives(x))


def test_step_takes_any_leading_dimensions(make):
    cell = make().double()
    h = torch.randn(2, 3, *cell.state_shape, dtype=torch.float64)
    x = torch.randn(2, 3, 3, dtype=torch.float64)
    whole = cell.step(h, x)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(cell.step(h[i, j], x[i, j]), whole[i, j])
            torch.testing.assert_close(cell.step(h[i, j][None], x[i, j][None])[0], whole[i, j])


def test_split_of_one_vector(make):
    cell = make()
    u = torch.randn(cell.in_proj.out_features)
    parts = cell.split(u)
    assert [tuple(p.shape) for p in parts] == list(cell.spec.drive_shapes(cell.sizes))
    assert torch.equal(torch.cat([p.reshape(-1) for p in parts]), u)
    batched = cell.split(u.expand(2, 5, -1))
    for a, b in zip(parts, batched, strict=True):
        assert torch.equal(a, b[1, 4])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda h, x: (h[..., :1], x), ValueError),
        (lambda h, x: (h.long(), x), TypeError),
        (lambda h, x: (h.double(), x), TypeError),
        (lambda h, x: (h[:1], x), ValueError),
        (lambda h, x: (h, x[:1]), ValueError),
        (lambda h, x: (h, x[..., :2]), ValueError),
        (lambda h, x: (h, x.double()), TypeError),
        (lambda h, x: (h, x.long()), TypeError),
        (lambda h, x: (h, x.tolist()), TypeError),
        (lambda h, x: (h.tolist(), x), TypeError),
        (lambda h, x: (h.to("meta"), x), ValueError),
        (lambda h, x: (h, x.to("meta")), ValueError),
        (lambda h, x: (h[0], x), ValueError),
    ],
)
def test_step_refuses(make, change, error):
    cell = make()
    h, x = change(cell.init_state(2), torch.randn(2, 3))
    with pytest.raises(error, match="got"):
        cell.step(h, x)


def test_a_recurrence_of_another_shape_is_refused():
    class Broken(Cell):
        spec = elman()

        def recurrence(self, h, u, w):
            return torch.tanh(w * h + u).sum(-1, keepdim=True)

    cell = Broken(3, 4)
    with pytest.raises(ValueError, match="shape"):
        sequential_apply(cell, torch.randn(2, 5, 3))


def test_step_derived_from_the_spec_equals_the_written_one(zoo):
    class Written(Cell):
        spec = zoo["lstm"].spec

        def recurrence(self, *arguments):
            return zoo["lstm"].equation(*arguments)

    torch.manual_seed(0)
    derived = Cell(3, 4, spec=zoo["lstm"].spec).double()
    written = Written(3, 4).double()
    written.load_state_dict(derived.state_dict())
    h, x = torch.randn(5, 2, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(derived.step(h, x), written.step(h, x))


def test_every_registered_cell():
    assert cell_names()
    for name in cell_names():
        entry = get_cell(name)
        assert entry.name == name
        cell = entry.factory(5)
        assert isinstance(cell, Cell)
        assert cell.d_in == 5
        assert cell.facts is entry.facts
        assert get_cell(entry.slug).slug == entry.slug
    with pytest.raises(KeyError, match="ParaGRU"):
        get_cell("ParaRGU")


def test_public_names():
    for name in pararnn.__all__:
        assert getattr(pararnn, name) is not None
    assert set(pararnn.__all__) <= set(dir(pararnn))
    text = Path(pararnn.__file__).read_text(encoding="utf-8")
    typed = re.findall(r"^    from \.\w+ import (\w+) as \1$", text, re.MULTILINE)
    assert {*typed, "__version__"} == set(pararnn.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = pararnn.nothing
