"""Multi-query associative recall: the DRM variants, and two recurrent cells beside them.

    python benchmarks/drm_mqar.py --device cuda --seeds 5 --jobs 8 --budget 150

The protocol is that of :func:`pararnn.drm.recall_probe`, with its published defaults. Models are small:
all seeds of one are trained at once, by :func:`torch.vmap` over their parameters, and several models
share a device, each in a process of its own that waits for the device as seldom as it can. Results are
written after every model; those that the budget does not reach are left out.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import Row, parser, record, save, target
from torch import Generator, Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from pararnn import DeltaMinGRU, ParaM2RNN
from pararnn.drm import CONTROLS, DRM, VARIANTS, DRMConfig, variant
from pararnn.drm.mqar import SIZES, VOCABULARY, recall_sequences
from pararnn.tasks import Batch

FIRST = ("J", "J_NO_METRIC", "I", "SSM_CONTROL", "J_NO_DIRECTION", "J_DIRECT_CONTROL")
PRESETS = ("published", "notes")
WIDTH = SIZES["d_state"]
KERNEL = 4
FORGET_BIAS = 3.0
BATCH, LR, WEIGHT_DECAY, CLIP = 32, 3e-4, 0.01, 1.0
NOT_ASKED = -100  # a target that counts for nothing
PATIENCE = 100  # steps between two looks at whether all numbers are finite
SMOKE = {
    **SIZES,
    "d_token": 8,
    "d_state": 8,
    "hidden_size": 8,
    "n_directions": 4,
    "metric_rank": 2,
    "direction_basis": 4,
    "metric_basis": 4,
    "mixer_hidden": 4,
    "memory_hidden": 4,
}


class Work(NamedTuple):
    """Runs of a model by name, with the semantics of the DRM (None for the others), by seed."""

    model: str
    preset: str | None
    seeds: tuple[int, ...]
    steps: int
    tests: int
    device: str
    smoke: bool


# -- the cells beside the DRM ----------------------------------------------------------------------


class MatrixMemory(nn.Module):
    """A ParaM2RNN, read by a query: ``W (Hᵀ q)``. Its forget gate starts near 0.95, as a start at
    1/2 forgets a pair before it is asked for."""

    def __init__(self, width: int, k_dim: int = 32, v_dim: int = 32):
        super().__init__()
        self.cell = ParaM2RNN(width, k_dim=k_dim, v_dim=v_dim)
        nn.init.constant_(self.cell.in_proj.bias[-1:], FORGET_BIAS)  # drives: k, v, forget gate
        self.query = nn.Linear(width, k_dim)
        self.out = nn.Linear(v_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        state, states = x.new_zeros(x.shape[0], *self.cell.state_shape), []
        for x_t in x.unbind(1):  # few steps; the solver does not take stacked parameters
            state = self.cell.step(state, x_t)
            states.append(state)
        read = self.query(x).unsqueeze(-2) @ torch.stack(states, 1)
        return self.out(read.squeeze(-2))


CELLS: dict[str, Callable[[int], nn.Module]] = {
    "ParaM2RNN": MatrixMemory,
    "DeltaMinGRU": lambda width: DeltaMinGRU(width, width),
}


class Recurrent(nn.Module):
    """Embedding, causal convolution, cell and MLP, each with a norm and a residual; then logits.

    The convolution lets a step see the token before it, as the mixer of a DRM does.
    """

    def __init__(self, cell: str, width: int = WIDTH):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.convolution = nn.Conv1d(width, width, KERNEL, padding=KERNEL - 1, groups=width)
        self.cell = CELLS[cell](width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(B, T, VOCABULARY)`` of tokens ``(B, T)``."""
        first, second, third, last = self.norms
        x = self.embedding(tokens)
        near = self.convolution(first(x).mT)[..., : x.shape[1]].mT
        x = x + nn.functional.silu(near)
        x = x + self.cell(second(x))
        x = x + self.mlp(third(x))
        return self.head(last(x))


# -- runs ------------------------------------------------------------------------------------------


def configuration(name: str, preset: str, seed: int = 0, smoke: bool = False) -> DRMConfig:
    """Of a DRM variant, at the sizes of the probe. In float32 the published precision of
    naturalization differs by rounding only; it waits for the device, so the safe one stands for it.
    The warm-up belongs to the protocol: either has the published one."""
    row, sizes = variant(name), SMOKE if smoke else SIZES
    sizes = {size: value for size, value in sizes.items() if size not in row.kept}
    config = row.config(**sizes, seed=seed)
    published = config.published()
    if preset == "published":
        return published.changed(naturalization_precision="safe")
    return config.changed(naturalization_warmup=published.naturalization_warmup)


def built(work: Work, seed: int) -> nn.Module:
    if work.preset is not None:
        model = DRM(configuration(work.model, work.preset, seed, work.smoke))
        if model.memory is not None:
            model.memory.backend = "eager"  # the fused scan has no rule for stacked parameters
        return model
    torch.manual_seed(seed)
    return Recurrent(work.model, 8 if work.smoke else WIDTH)


def targets(batch: Batch) -> Tensor:
    """Answers ``(B, T)`` where one is asked for."""
    if batch.asked is None:
        return batch.y
    return batch.y.where(batch.asked, NOT_ASKED)


def drawn(seeds: Sequence[int], batches: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens and targets ``(batches, seeds, B, T)``; every seed has a stream of its own."""
    generators = [Generator().manual_seed(seed) for seed in seeds]
    x, y = [], []
    for _ in range(batches):
        parts = [recall_sequences(generator, BATCH) for generator in generators]
        x.append(torch.stack([part.x for part in parts]))
        y.append(torch.stack([targets(part) for part in parts]))
    return torch.stack(x).to(device), torch.stack(y).to(device)


def evaluated(model: nn.Module, last: int) -> int:
    """The step whose strength of naturalization is that of evaluation, after the last one."""
    if isinstance(model, DRM) and model.config.evaluation_strength == "maximum":
        return max(last, model.config.naturalization_warmup)
    return last


def recall_together(
    models: Sequence[nn.Module], seeds: Sequence[int], steps: int, tests: int, device: str
) -> list[Row]:
    """Loss and accuracy of several models of one kind: what
    :func:`pararnn.drm.recall_probe` gives for each, with its seed, up to rounding.

    Raises
    ------
    ValueError
        If a loss or gradient was not finite.
    """
    params, buffers = stack_module_state([model.to(device) for model in models])
    optimizer = torch.optim.AdamW(params.values(), lr=LR, weight_decay=WEIGHT_DECAY)
    model = models[0]

    def logits(p: Any, b: Any, x: Tensor, step: int) -> Tensor:
        given = {"step": step} if isinstance(model, DRM) else {}
        out = functional_call(model, (p, b), (x,), given)
        return (out.logits if isinstance(model, DRM) else out).flatten(0, 1)

    def loss(p: Any, b: Any, x: Tensor, y: Tensor, step: int) -> Tensor:
        y = y.flatten()
        return nn.functional.cross_entropy(logits(p, b, x, step), y, ignore_index=NOT_ASKED)

    def scores(p: Any, b: Any, x: Tensor, y: Tensor, step: int) -> tuple[Tensor, Tensor]:
        right = logits(p, b, x, step).argmax(-1) == y.flatten()  # never, where nothing is asked
        return loss(p, b, x, y, step), right.sum() / (y != NOT_ASKED).sum()

    over = (0, 0, 0, 0, None)
    x, y = drawn(seeds, steps, device)
    finite = torch.ones((), dtype=torch.bool, device=device)
    for step in range(steps):
        losses = vmap(loss, over)(params, buffers, x[step], y[step], step)
        optimizer.zero_grad()
        losses.sum().backward()
        grads = [p.grad for p in params.values() if p.grad is not None]  # none for an unused part
        norm = torch.stack([g.square().flatten(1).sum(1) for g in grads]).sum(0).sqrt()
        finite &= losses.isfinite().all() & norm.isfinite().all()
        if (step % PATIENCE == 0 or step == steps - 1) and not finite:
            raise ValueError(f"got numbers that are not finite up to step {step}; lower LR.")
        factor = (CLIP / (norm + 1e-6)).clamp(max=1.0)
        for g in grads:
            g.mul_(factor.view(-1, *[1] * (g.ndim - 1)))
        optimizer.step()
    model.eval()
    x, y = drawn([100_000 + seed for seed in seeds], tests, device)
    with torch.no_grad():
        at = evaluated(model, steps - 1)
        found = [vmap(scores, over)(params, buffers, *pair, at) for pair in zip(x, y, strict=True)]
    mean_loss, accuracy = (torch.stack(part).mean(0).tolist() for part in zip(*found, strict=True))
    return [{"loss": a, "accuracy": b} for a, b in zip(mean_loss, accuracy, strict=True)]


def run(work: Work) -> list[Row]:
    """Train and test a model with all seeds; an error is part of the result."""
    began = time.perf_counter()
    same = work._asdict()
    rows: list[Row] = [{**same, "seed": seed} for seed in same.pop("seeds")]
    try:
        models = [built(work, seed) for seed in work.seeds]
        found = recall_together(models, work.seeds, work.steps, work.tests, work.device)
        same["parameters"] = sum(p.numel() for p in models[0].parameters())
        same["seconds_together"] = round(time.perf_counter() - began, 1)
        return [row | same | scores for row, scores in zip(rows, found, strict=True)]
    except Exception:
        return [row | {"exception": traceback.format_exc()} for row in rows]


def plan(args: argparse.Namespace) -> list[Work]:
    """All runs. Variants that the sizes of the probe make equal are run once, under the first of
    their names."""
    again = {name for names in aliases().values() for name in names}
    rest = [name for name in VARIANTS if name not in FIRST and name not in again]
    models: list[tuple[str, str | None]] = [(name, None) for name in CELLS]
    models += [(name, "published") for name in FIRST]
    models += [(name, "notes") for name in FIRST]
    models += [(name, "published") for name in rest]
    models += [(n, preset) for n in args.model or () if n in CONTROLS for preset in PRESETS]
    seeds = tuple(range(1, args.seeds + 1))
    return [
        Work(name, preset, seeds, args.steps, args.tests, args.device, args.smoke)
        for name, preset in models
        if not args.model or name in args.model
    ]


def aliases() -> dict[str, list[str]]:
    """Other names of a variant, by the name under which it is run."""
    runs: dict[DRMConfig, str] = {}
    names: dict[str, list[str]] = {}
    for name in (*FIRST, *VARIANTS):
        first = runs.setdefault(configuration(name, "notes"), name)
        if first != name:
            names.setdefault(first, []).append(name)
    return names


def alone() -> None:
    """In every process: its share of the machine is one thread."""
    torch.set_num_threads(1)


def finished(work: list[Work], jobs: int, until: float) -> Iterator[list[Row]]:
    """Results in the order in which they come, until the time is over."""
    with multiprocessing.get_context("spawn").Pool(jobs, alone) as pool:
        results = pool.imap_unordered(run, work)
        for _ in work:
            try:
                yield results.next(timeout=max(0.0, until - time.perf_counter()))
            except multiprocessing.TimeoutError:
                return


def main(arguments: list[str] | None = None) -> Path:
    made = parser(__doc__, budget=3600)
    made.add_argument("--device", default="cpu")
    made.add_argument("--model", action="append", help="only this one; repeatable")
    made.add_argument("--seeds", type=int, default=3, help="1 to this one")
    made.add_argument("--steps", type=int, default=1000, help="the published number is 1000")
    made.add_argument("--tests", type=int, default=32, help="test batches")
    made.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    args = made.parse_args(arguments)
    known = (*CELLS, *VARIANTS, *CONTROLS)
    for name in args.model or ():
        if name not in known:
            made.error(f"--model: got {name!r}, expected one of {', '.join(known)}.")
    began = time.perf_counter()
    work = plan(args)
    found = record(
        "python benchmarks/drm_mqar.py", args.device, args.revision, arguments, dtype="float32",
        jobs=args.jobs, planned=sum(len(w.seeds) for w in work), aliases=aliases(), rows=[],
    )  # fmt: skip
    topic = "drm-mqar" + ("" if args.steps == 1000 else f"-{args.steps}")
    file = target(args.out, found, args.device, topic, args.smoke)
    for rows in finished(work, args.jobs, began + args.budget):
        found["rows"] += rows
        found["seconds"] = round(time.perf_counter() - began, 1)
        save(file, found)
        for row in rows:
            label = (
                f"[{found['seconds']} s] {row['model']} {row['preset'] or ''} seed {row['seed']}"
            )
            if "exception" in row:
                print(f"{label}: {row['exception'].strip().splitlines()[-1]}", flush=True)
            else:
                print(f"{label}: {row['loss']:.3f} nats, {row['accuracy']:.1%}", flush=True)
    print(f"{len(found['rows'])} of {found['planned']} runs in {file}")
    return file


if __name__ == "__main__":
    main()
