"""The DRM written out again from the notes: token by token, every matrix dense, no solver, no scan.

It reads a model's configuration and its parameters by name, and calls none of its code.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

NORM = 1e-6  # of the RMS norm


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


class Written:
    """A model in float64, and what the notes say of it, for one sequence."""

    def __init__(self, model: nn.Module):
        self.c: Any = model.config
        self.p = {name: value.detach() for name, value in model.state_dict().items()}
        self.radius = self.c.state_radius if self.c.bounded_state else None

    def affine(self, name: str, x: Tensor) -> Tensor:
        y = self.p[f"{name}.weight"] @ x
        bias = self.p.get(f"{name}.bias")
        return y if bias is None else y + bias

    def bound(self, z: Tensor) -> Tensor:
        if self.radius is None:
            return z
        clipped = z * min(1.0, self.radius / max(1e-8, float(z.square().sum().sqrt())))
        return self.radius * torch.tanh(clipped / self.radius)

    def corrected(self, z: Tensor) -> Tensor:
        """After mixer, residual, memory and refinement."""
        return self.bound(z) if self.c.bound_corrections else z

    # Sections 2 to 5.

    def trunk(self, name: str, z: Tensor) -> Tensor:
        return gelu(self.affine(f"{name}.3", gelu(self.affine(f"{name}.0", z))))

    def combined(self, name: str, head: Tensor, count: int) -> Tensor:
        """Rows ``(count, d)``, from a basis if there is one."""
        rows = head.reshape(count, -1)
        basis = self.p.get(f"{name}.basis")
        return rows if basis is None else rows @ basis

    def directions(self, part: str, z: Tensor) -> tuple[Tensor, Tensor]:
        c, name = self.c, f"{part}.direction"
        g = self.trunk(f"{name}.trunk", z)
        rows = self.combined(name, self.affine(f"{name}.heads", g), c.n_directions)
        if c.normalize_directions:
            rows = torch.stack(
                [v / max(c.direction_floor, float(v.square().sum().sqrt())) for v in rows]
            )
        gates = sigmoid(
            (self.affine(f"{name}.gate_head", g) + c.gate_logit_bias) / c.gate_temperature
        )
        return rows, gates

    def metric(self, part: str, z: Tensor) -> Tensor:
        c, name = self.c, f"{part}.metric"
        g = self.trunk(f"{name}.trunk", z)
        diagonal = torch.log1p(torch.exp(self.affine(f"{name}.diagonal_head", g))) + c.metric_eps
        if not c.metric_rank:
            return torch.diag(diagonal)
        head = self.affine(f"{name}.factor_head", g)
        if f"{name}.basis" in self.p:
            u = self.combined(name, head, c.metric_rank).T
        else:
            u = head.reshape(c.d_state, c.metric_rank)
        return torch.diag(diagonal) + (u @ u.T) / c.metric_rank

    def network(self, name: str, z: Tensor, e: Tensor) -> Tensor:
        hidden = gelu(self.affine(f"{name}.first", torch.cat([z, e])))
        return torch.tanh(self.affine(f"{name}.second", hidden))

    def velocity(self, part: str, z: Tensor, e: Tensor) -> tuple[Tensor, float]:
        """At z, for one token; and dimD."""
        c, s, mass = self.c, self.c.naturalization_strength, 0.0
        weights = rows = None
        if c.transition == "direct":
            raw = self.network(f"{part}.direct", z, e)
            if c.direct_scale == "matched":
                gate = 1 / (1 + math.exp(-c.gate_logit_bias / c.gate_temperature))
                raw = raw * gate * math.sqrt(c.n_directions / c.d_state)
        else:
            rows, gates = self.directions(part, z)
            mass = float(gates.sum())
            weights = gates * self.network(f"{part}.flow", z, e)
            raw = sum((w * v for w, v in zip(weights, rows, strict=True)), torch.zeros_like(z))
        if not s:
            return raw, mass
        g, one = self.metric(part, z), torch.eye(len(z), dtype=z.dtype)
        damping = c.naturalization_damping
        if c.naturalization_form == "post":
            solved = torch.linalg.solve(g + damping * one, raw)
        else:
            gram = rows @ g @ rows.T + max(damping, 1e-6) * torch.eye(len(rows), dtype=z.dtype)
            if c.naturalization_form == "subspace":
                solved = rows.T @ torch.linalg.solve(gram, weights)
            else:
                solved = torch.linalg.solve(torch.linalg.cholesky(gram), rows).T @ weights
        return (1 - s) * raw + s * solved, mass

    # Sections 6 and 7.

    def base(
        self, z: Tensor, e: Tensor, block: bool
    ) -> tuple[list[Tensor], list[Tensor], list[float]]:
        """Base states, increments and dimD of one block."""
        c, start, total = self.c, z, torch.zeros_like(z)
        states, increments, masses = [], [], []
        for token in e:
            mass, increment = 0.0, torch.zeros_like(z)
            if c.transition != "none":
                v, mass = self.velocity("dynamics", start if block else z, token)
                increment = c.dt * v
                if block and c.bound_increments:
                    increment = self.bound(start + increment) - start
            if c.transition == "none":
                new = z
            elif block:
                total = total + increment
                new = self.bound(start + total)
            else:
                new = self.bound(z + increment)
                increment = new - z
            states.append(new)
            increments.append(increment)
            masses.append(mass)
            z = new
        return states, increments, masses

    def mixed(
        self,
        start: Tensor,
        states: list[Tensor],
        increments: list[Tensor],
        e: Tensor,
        masses: list[float],
    ) -> list[Tensor]:
        c, features, before = self.c, [], start
        for z, moved, token, mass in zip(states, increments, e, masses, strict=True):
            scalars = torch.tensor([mass, 0.0], dtype=z.dtype)  # no risk
            features.append(torch.cat([z, z - before, moved, token, scalars]))
            before = z
        rows = [silu(self.affine("mixer.in_proj", f)) for f in features]
        for layer in range(c.mixer_layers):
            taps = self.p[f"mixer.convs.{layer}.weight"].squeeze(1)
            reach = c.mixer_dilation_growth**layer
            near = []
            for t in range(len(rows)):
                y = self.p[f"mixer.convs.{layer}.bias"]
                for k in range(c.mixer_kernel):
                    at = t - reach * (c.mixer_kernel - 1 - k)
                    if at >= 0:
                        y = y + taps[:, k] * rows[at]
                near.append(y)
            points = [self.affine(f"mixer.points.{layer}", silu(y)) for y in near]
            rows = [r + p for r, p in zip(rows, points, strict=True)]
        out = [self.affine("mixer.out_proj", r) for r in rows]
        return [self.corrected(z + c.mixer_scale * y) for z, y in zip(states, out, strict=True)]

    # Sections 8 and 9.

    def remembered(
        self, start: Tensor, states: list[Tensor], e: Tensor, memory: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        c, out, before = self.c, [], start
        for z, token in zip(states, e, strict=True):
            h = silu(self.affine("memory.in_proj", torch.cat([before, token])))
            forget = sigmoid(self.affine("memory.forget", h) + c.memory_forget_bias)
            write = sigmoid(self.affine("memory.write", h))
            memory = forget * memory + write * torch.tanh(self.affine("memory.candidate", h))
            out.append(self.corrected(z + c.memory_scale * memory))
            before = z
        return out, memory

    def refined(self, part: str, start: Tensor, states: list[Tensor], e: Tensor) -> list[Tensor]:
        c, out, before = self.c, [], start
        for z, token in zip(states, e, strict=True):
            v, _ = self.velocity(f"{part}.dynamics", before, token)
            out.append(self.corrected(z + c.refinement_scale * c.dt * v))
            before = z
        return out

    # Section 10.

    def emitted(self, z: Tensor) -> Tensor:
        normed = z / (z.square().mean() + NORM).sqrt() * self.p["emitter.norm.weight"]
        return self.affine("emitter.head", gelu(self.affine("emitter.body.0", normed)))

    def logits(self, tokens: Tensor) -> Tensor:
        """``(T, vocab_size)`` of one sequence of tokens ``(T,)``."""
        c, z = self.c, self.p["initializer.z0"]
        memory, found = torch.zeros_like(z), []
        length = c.block_length or len(tokens)
        acts = c.path == "block" or c.recurrent_corrections
        for piece in tokens.split(length):
            e = self.p["embedding.table.weight"][piece]
            states, increments, masses = self.base(z, e, c.path == "block")
            end = states[-1]
            if acts and c.mixer:
                states = self.mixed(z, states, increments, e, masses)
            if acts and c.token_residual:
                moved = [c.token_residual_scale * self.affine("residual.proj", x) for x in e]
                states = [self.corrected(s + m) for s, m in zip(states, moved, strict=True)]
            if acts and c.memory:
                first = memory if c.memory_start == "carried" else z
                states, memory = self.remembered(z, states, e, first)
            for layer in range(c.refinement_layers if acts else 0):
                states = self.refined(f"refinement.{layer}", z, states, e)
            found += [self.emitted(s) for s in states]
            z = states[-1] if c.path == "block" and c.block_carry == "final" else end
        return torch.stack(found)
