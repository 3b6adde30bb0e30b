"""Modules inside a cell and around its weights: called, never read past; hooks act once a call."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from pararnn import Cell, ParaGRU, ParaLSTM, ParaRNN, Spec, decode, explain, get_cell, solve, tanh
from pararnn.cells import MinGRU, Mixer, cell_names
from pararnn.layers import MinGRUBlock, takes_gaps

CLOSE = 1e-13  # a few roundings a step, and states that forget


class LoRA(nn.Module):
    """A wrapper that has neither weight nor bias nor widths."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(2, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def lora(cell: Cell) -> None:
    cell.in_proj = LoRA(cell.in_proj)


def frozen_lora(cell: Cell) -> None:
    cell.requires_grad_(False)
    lora(cell)


def replaced(cell: Cell) -> None:
    cell.in_proj = nn.Sequential(nn.Linear(cell.d_in, 3), nn.Linear(3, cell.drive_width)).double()


def hooked(cell: Cell) -> None:
    cell.in_proj.register_forward_hook(lambda module, args, out: 1.5 * out)


def pre_hooked(cell: Cell) -> None:
    cell.in_proj.register_forward_pre_hook(lambda module, args: (-args[0],))


def pruned(cell: Cell) -> None:
    prune.l1_unstructured(cell.in_proj, "weight", 0.5)
    with torch.no_grad():  # what a training step does: the weight is stale until the next call
        cell.in_proj.weight_orig.mul_(1.7)


def old_weight_norm(cell: Cell) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(cell.in_proj)
    with torch.no_grad():
        cell.in_proj.weight_g.mul_(1.7)


def weight_norm(cell: Cell) -> None:
    parametrizations.weight_norm(cell.in_proj)


def spectral_norm(cell: Cell) -> None:
    parametrizations.spectral_norm(cell.in_proj)
    cell.eval()


WRAPPERS = (
    lora,
    frozen_lora,
    replaced,
    hooked,
    pre_hooked,
    pruned,
    old_weight_norm,
    weight_norm,
    spectral_norm,
)


def drawn(name: str, length: int = 7) -> tuple[Cell, Tensor, Tensor | None]:
    torch.manual_seed(0)
    cell = get_cell(name).factory().double()
    x = torch.randn(2, length, cell.d_in, dtype=torch.float64)
    gaps = torch.rand(2, length, dtype=torch.float64) if takes_gaps(cell) else None
    return cell, x, gaps


def by_hand(cell: Cell, x: Tensor, gaps: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs and final state by a loop over the step, with drives that the projection is called
    for."""
    h, out = cell.init_state(len(x)), []
    u = cell.in_proj(x)
    for t in range(x.shape[1]):
        more = {} if gaps is None else {"dt": gaps[:, t]}
        h = cell.step(h, drives=u[:, t], **more)
        out.append(cell.output(h, drives=u[:, t]))
    return torch.stack(out, 1), h


def close(got: Tensor, want: Tensor, bound: float = CLOSE) -> None:
    assert got.shape == want.shape
    assert ((got - want).abs().max() <= bound * want.abs().max()).item()


@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("name", cell_names())
def test_the_projection_is_called(name, wrap):
    cell, x, gaps = drawn(name)
    plain, _ = by_hand(cell, x, gaps)
    wrap(cell)
    want, last = by_hand(cell, x, gaps)
    if wrap not in (weight_norm, old_weight_norm, spectral_norm):
        assert not torch.allclose(plain, want), "the wrapper changes nothing"
    more = {} if gaps is None else {"dt": gaps}
    found = solve(cell, x, **more)
    close(found.output, want)
    close(found.final_state, last)
    close(solve(cell, x, method="sequential", **more).output, want)
    rnn = ParaRNN(cell)
    output, h_n = rnn(x, **more)
    close(output, want)
    close(h_n[0], last)
    explain(cell, x)
    state, h, flat = None, cell.init_state(2), None
    for t in range(x.shape[1]):
        now = {k: v[:, t] for k, v in more.items()}
        y, state = rnn.step(x[:, t], state, **now)
        close(y, want[:, t])
        h = cell.step(h, x[:, t], **now)
        if isinstance(cell, Mixer):
            y, flat = cell.stream(x[:, t], flat, *now.values())
            close(y, want[:, t])
    close(state[0], last)
    close(h, last)
    if isinstance(cell, Mixer):
        close(cell(x, None, *more.values()), want)


@pytest.mark.parametrize("name", cell_names())
def test_quantized(name):
    """The layers of quantized weights have no parameters; forward, step and loop are one."""
    cell, x, gaps = drawn(name)
    cell, x = cell.float(), x.float()
    gaps = None if gaps is None else gaps.float()
    small = torch.ao.quantization.quantize_dynamic(cell)
    assert type(small.in_proj) is not nn.Linear
    more = {} if gaps is None else {"dt": gaps}
    with torch.no_grad():
        rnn = ParaRNN(small)
        output, h_n = rnn(x, **more)
        loop, final = by_hand(small, x, gaps)  # with the drives of one call, as the layer's
        close(h_n[0], final, 1e-5)
        # An output projection that is quantized has the scale of what it is called on.
        close(output, loop, 2e-2 if hasattr(small, "out_proj") else 1e-5)
        first = {k: v[:, :1] for k, v in more.items()}
        whole, _ = rnn(x[:, :1], **first)
        step, _ = rnn.step(x[:, 0], None, **{k: v[:, 0] for k, v in first.items()})
        close(step, whole[:, 0], 1e-5)
        if "snapped" not in name:  # where a small error of an angle can be a turn
            want, _ = by_hand(cell, x, gaps)
            assert 0 < (output - want).abs().max() < 0.2 * want.abs().max()


def test_widths_and_dtypes_of_a_wrapped_projection():
    cell = ParaGRU(3, 4)
    assert (cell.device, cell.dtype) == (torch.device("cpu"), torch.float32)
    frozen_lora(cell)
    with pytest.raises(TypeError, match=r"x: got dtype torch\.float64, expected torch\.float32"):
        cell.drives(torch.randn(2, 3, dtype=torch.float64))
    bare = torch.ao.quantization.quantize_dynamic(MinGRU(3, 4))
    assert not list(bare.parameters())
    assert (bare.dtype, bare.double().dtype) == (torch.float32, torch.float64)


# -- hooks on the cell ------------------------------------------------------------------------------


def masked(cell: Cell) -> Cell:
    """The same cell with the weight that its mask leaves, and no hooks."""
    plain = copy.deepcopy(cell)
    for name in list(plain._forward_pre_hooks):
        del plain._forward_pre_hooks[name]
    return plain


PRUNING = {
    "l1": lambda cell: prune.l1_unstructured(cell, "A_z", 2),
    "random": lambda cell: prune.random_unstructured(cell, "A_z", 2),
    "identity": lambda cell: (
        prune.identity(cell, "A_z"),
        prune.l1_unstructured(cell, "A_z", 0.25),
    ),
    "custom": lambda cell: prune.custom_from_mask(cell, "A_z", torch.tensor([1, 0, 1, 0])),
    "twice": lambda cell: (
        prune.l1_unstructured(cell, "A_z", 1),
        prune.random_unstructured(cell, "A_z", 1),
    ),
}


@pytest.mark.parametrize("kind", PRUNING)
def test_pruned_recurrent_weights_train(kind):
    torch.manual_seed(0)
    cell = ParaGRU(3, 4).double()
    nn.init.normal_(cell.A_z)
    PRUNING[kind](cell)
    rnn, x = ParaRNN(cell), torch.randn(2, 9, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(rnn.parameters(), lr=0.1)
    for _ in range(3):  # the graph of a mask that is applied once is gone at the second step
        optimizer.zero_grad()
        rnn(x)[0].square().sum().backward()
        gone = cell.A_z_mask == 0
        assert cell.A_z_orig.grad[gone].eq(0).all()
        assert cell.A_z_orig.grad[~gone].ne(0).all()
        optimizer.step()
    fresh = ParaGRU(3, 4).double()
    PRUNING[kind](fresh)
    fresh.load_state_dict(cell.state_dict())  # its weight is stale until something computes it
    plain = ParaGRU(3, 4).double()
    state = {k: v for k, v in cell.state_dict().items() if "A_z" not in k}
    plain.load_state_dict(state | {"A_z": cell.A_z_orig * cell.A_z_mask})
    want = ParaRNN(plain)(x)[0]
    for got in (ParaRNN(copy_of(fresh))(x)[0], solve(copy_of(fresh), x).output):
        assert torch.equal(got, want)
    h = copy_of(fresh).step(torch.zeros(2, 4, dtype=torch.float64), x[:, 0])
    close(h, want[:, 0])
    close(ParaRNN(copy_of(fresh)).step(x[:, 0])[0], want[:, 0])
    with torch.no_grad():
        close(decode(copy_of(fresh), x[:, 0], torch.zeros_like(h)), want[:, 0])


def copy_of(cell: Cell) -> Cell:
    """A copy whose weight is as stale as its own (a graph cannot be copied)."""
    stale = cell.A_z.detach().clone()
    cell.A_z = stale
    return copy.deepcopy(cell)


def old_style(cell: Cell) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(cell, "A_z", dim=None)


class Positive(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return nn.functional.softplus(a)


@pytest.mark.parametrize(
    "wrap",
    [
        old_style,
        lambda cell: parametrizations.weight_norm(cell, "A_z", dim=None),
        lambda cell: parametrize.register_parametrization(cell, "A_z", Positive()),
    ],
    ids=["old weight_norm", "weight_norm", "parametrized"],
)
def test_parametrized_recurrent_weights_train(wrap):
    torch.manual_seed(0)
    cell = ParaGRU(3, 4, max_recurrent_norm=None).double()
    nn.init.normal_(cell.A_z)
    wrap(cell)
    rnn, x = ParaRNN(cell), torch.randn(2, 9, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(rnn.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        rnn(x)[0].square().sum().backward()
        got = [p.grad.clone() for p in rnn.parameters()]
        optimizer.zero_grad()
        h, out = cell.init_state(2), []
        for t in range(9):
            h = cell.step(h, x[:, t])
            out.append(h)
        torch.stack(out, 1).square().sum().backward()
        for p, g in zip(rnn.parameters(), got, strict=True):
            close(g, p.grad)
        optimizer.step()


def test_spectral_norm_of_heads():
    torch.manual_seed(0)
    cell = ParaGRU(3, 4, mix="head", n_heads=1).double()
    parametrizations.spectral_norm(cell, "A_n")
    rnn, x = ParaRNN(cell), torch.randn(2, 9, 3, dtype=torch.float64)
    for _ in range(2):
        rnn(x)[0].sum().backward()
    assert cell.parametrizations.A_n.original.grad.abs().max() > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = nn.utils.spectral_norm(ParaGRU(3, 4, mix="head", n_heads=1).double(), "A_n", dim=1)
    layer = ParaRNN(old)
    for _ in range(2):
        layer(x)[0].sum().backward()
    layer.eval()
    assert torch.equal(layer(x)[0], solve(old, x).output)


class Stepper(nn.Module):
    """A module without a Spec whose own weight is pruned."""

    def __init__(self, as_forward: bool = False):
        super().__init__()
        self.W = nn.Parameter(torch.randn(4, 4, dtype=torch.float64) / 3)
        self.U = nn.Linear(3, 4, dtype=torch.float64)
        self.state_shape, self.d_in, self.as_forward = (4,), 3, as_forward

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h @ self.W + self.U(x))

    def step(self, h: Tensor, x: Tensor) -> Tensor:
        return self(h, x) if self.as_forward else Stepper.forward(self, h, x)


@pytest.mark.parametrize("method", ["auto", "sequential", "newton", "shooting"])
@pytest.mark.parametrize("as_forward", [False, True])
def test_a_module_without_a_spec(method, as_forward):
    torch.manual_seed(0)
    cell = Stepper(as_forward)
    prune.l1_unstructured(cell, "W", 6)
    calls = []
    if not as_forward:
        cell.register_forward_hook(lambda module, args, out: calls.append(args))
    rnn, x = ParaRNN(cell, solver=method), torch.randn(2, 9, 3, dtype=torch.float64)
    for _ in range(2):
        rnn.zero_grad()
        rnn(x)[0].square().sum().backward()
        got, want = cell.W_orig.grad.clone(), torch.zeros(())
        rnn.zero_grad()
        h, total = torch.zeros(2, 4, dtype=torch.float64), 0.0
        for t in range(9):
            h = torch.tanh(h @ (cell.W_orig * cell.W_mask) + cell.U(x[:, t]))
            total = total + h.square().sum()
        total.backward()
        want = cell.W_orig.grad
        close(got, want, 1e-10)
        with torch.no_grad():
            cell.W_orig.mul_(0.9)
    if not as_forward:
        assert len(calls) == 2
    assert "forward" not in vars(cell)


@pytest.mark.parametrize("name", cell_names())
def test_hooks_act_once_a_call(name):
    """Before and after, on a sequence and on a step; what they return is taken."""
    cell, x, gaps = drawn(name)
    more = {} if gaps is None else {"dt": gaps}
    rnn = ParaRNN(cell)
    want, last = rnn(2 * x, **more)
    seen = []
    cell.register_forward_pre_hook(
        lambda module, args: (seen.append("before"), (2 * args[0], *args[1:]))[1]
    )
    cell.register_forward_hook(
        lambda module, args, out: (seen.append("after"), (3 * out[0], out[1]))[1]
    )
    assert rnn(x, **more)[0].shape == want.shape
    assert seen == ["before", "after"]
    got, h_n = rnn(x, **more)
    assert torch.equal(got, 3 * want)
    assert torch.equal(h_n, last)
    y, _ = rnn.step(x[:, 0], **{k: v[:, 0] for k, v in more.items()})
    assert seen == ["before", "after"] * 3
    close(y, 3 * want[:, 0])
    if isinstance(cell, Mixer):
        cell.stream(x[:, 0], None, *(v[:, 0] for v in more.values()))
        assert seen == ["before", "after"] * 4


def test_backward_hooks():
    torch.manual_seed(0)
    cell, seen = ParaLSTM(3, 4), []
    cell.register_full_backward_hook(lambda module, gi, go: seen.append((gi[0], go[0])))
    x = torch.randn(2, 5, 3, requires_grad=True)
    ParaRNN(cell)(x)[0].sum().backward()
    ((inner, outer),) = seen
    assert torch.equal(inner, x.grad)
    assert torch.equal(outer, torch.ones(2, 5, 4))


def test_blocks_call_their_mixer():
    block, seen = MinGRUBlock(4, mixer="delta", mixer_kwargs={"n_heads": 2}), []
    block.mixer.register_forward_pre_hook(lambda module, args: seen.append(len(args)))
    block(torch.randn(2, 3, 4))
    block.step(torch.randn(2, 4))
    assert len(seen) == 2


def test_a_failed_call_leaves_the_module_as_it_was():
    cell = Stepper()
    cell.register_forward_hook(lambda *_: None)
    cell.forward = before = lambda h, x: h
    with pytest.raises(ValueError, match="x"):
        ParaRNN(cell)(torch.randn(2, 3, 3, dtype=torch.float64), torch.randn(1, 2, 5).double())
    assert vars(cell)["forward"] is before


# -- layers after the first -------------------------------------------------------------------------


CHANGED = {
    "parametrization": lambda c: parametrizations.weight_norm(c, "A_z", dim=None),
    "on 'in_proj'": lambda c: parametrizations.weight_norm(c.in_proj),
    "forward pre hooks": lambda c: prune.l1_unstructured(c, "A_z", 2),
    "forward hooks": lambda c: c.register_forward_hook(lambda *_: None),
    "LoRA as in_proj": lora,
    "a submodule 'norm'": lambda c: c.add_module("norm", nn.LayerNorm(3)),
    "other parameters": lambda c: c.register_parameter("extra", nn.Parameter(torch.ones(1))),
}


@pytest.mark.parametrize("what", CHANGED)
def test_changed_cells_are_not_rebuilt(what):
    """A second layer without what the first has would be silently plain."""
    cell = ParaGRU(3, 4)
    CHANGED[what](cell)
    with pytest.raises(ValueError, match=f"{what}.*pass a list"):
        ParaRNN(cell, num_layers=2)
    assert ParaRNN(cell).num_layers == 1


with Spec("Leaky") as LEAKY:
    _h = LEAKY.state("h", bounds=(-1, 1))
    (_u,) = LEAKY.drives("u")
    (_w,) = LEAKY.maps("w", structure="diagonal")
    LEAKY.next(_h, tanh(_w(_h) + _u))


class Scaled(Cell):
    """A user's cell with an argument of its own."""

    spec = LEAKY

    def __init__(self, d_in: int, d_h: int, scale: float = 1.0, **kwargs):
        self.scale = scale
        super().__init__(d_in, d_h, **kwargs)

    def recurrence(self, h, u, w):
        return torch.tanh(self.scale * (w * h + u))


class Told(Scaled):
    def hyperparameters(self):
        return {"d_in": self.d_in, "d_h": self.d_h, "scale": self.scale, "bias": self.has_bias}


class Half(Scaled):
    def hyperparameters(self):
        return {"d_in": self.d_in, "d_h": self.d_h, "bias": self.has_bias}


def test_own_arguments():
    """Rebuilt as it was, or an error that names hyperparameters."""
    stack = ParaRNN(Told(3, 4, scale=2.5), num_layers=3)
    assert [c.scale for c in stack.cells] == [2.5] * 3
    stack = ParaRNN(Told(3, 4, bias=False), num_layers=2)
    assert [c.in_proj.bias for c in stack.cells] == [None] * 2
    for kind, name in ((Half, "scale"), (Scaled, "d_h")):
        with pytest.raises(TypeError, match=rf"{name}.*hyperparameters\(\)"):
            ParaRNN(kind(3, 4, scale=2.5), num_layers=2)


@pytest.mark.parametrize("name", cell_names())
def test_every_cell_is_rebuilt_as_it_was(name):
    cell = get_cell(name).factory(bias=False)
    again = cell.rebuilt()
    assert again.hyperparameters() == cell.hyperparameters()
    assert again.in_proj.bias is None
    assert type(again) is type(cell)


# -- shards -----------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    """A process group of one process."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this build of PyTorch has no gloo")
    if dist.is_initialized():
        pytest.skip("a process group is there already")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "name", ["ParaGRU[head]", "ParaLSTM", "MinGRU[plain]", "DeltaMinGRU[nh=1]"]
)
def test_sharded_cells(alone, name):
    """FSDP2 a cell: gathered in a call, gone after it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    cell = get_cell(name).factory(5)
    plain, rnn = ParaRNN(copy.deepcopy(cell)), ParaRNN(cell)
    mesh = init_device_mesh("cpu", (1,))
    for c in rnn.cells:
        fully_shard(c, mesh=mesh)
    fully_shard(rnn, mesh=mesh)
    x = torch.randn(2, 9, 5)
    for _ in range(2):
        for layer in (plain, rnn):
            layer.zero_grad()
            layer(x)[0].square().sum().backward()
        assert torch.equal(rnn(x)[0], plain(x)[0])
        for p, q in zip(rnn.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
