"""Sections of `gpu_drm.py`: the recurrence in a loop, by blocks and solved in parallel."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from gpu_drm_session import DRMSession, batch, drawn, loss_of
from harness import Row, say
from torch import Tensor

STEPS = 40
ROLLOUTS = (
    ("J", "initial", 0.08),
    ("J", "initial", 0.3),
    ("J_NO_DIRECTION", "initial", 0.08),
    ("J", "trained", 0.08),
    ("J", "trained", 0.01),
    ("J_NO_DIRECTION", "trained", 0.08),
)
ROLLOUT = (2, 128)
WINDOWS = (8, 64)
GAPS = [
    (v, w, dt)
    for v in ("J", "J_NO_DIRECTION")
    for w in ("initial", "trained")
    for dt in (0.02, 0.08)
]
LENGTHS = (4, 16, 64, 256, 512)


class Rollouts(DRMSession):
    """Sections about rollouts, of weights as they are drawn or trained for `STEPS` steps."""

    def __init__(self, args: argparse.Namespace):
        super().__init__(args)
        self.weights: dict[str, Any] = {}

    def trained(self, variant: str) -> Any:
        """A model after a few steps, once for each variant."""
        if variant not in self.weights:
            model = self.model(variant)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
            losses = []
            for step in range(2 if self.smoke else STEPS):
                tokens = batch(self.shape((16, 512)), self.device, seed=step)
                loss = loss_of(model, tokens, "bfloat16")
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.detach())
            last = [round(float(x), 3) for x in (losses[0], losses[-1])]
            say(f"trained {variant}: {last} nats a byte, first and last")
            self.found.setdefault("trained", []).append({"variant": variant, "nats": last})
            self.weights[variant] = model.state_dict()
        return self.weights[variant]

    def problem(
        self, variant: str, weights: str, dt: float, shape: tuple[int, int]
    ) -> tuple[Any, Tensor, Tensor, float]:
        """Dynamics, first states, embeddings and strength of a rollout."""
        model = self.model(variant, dt=dt)
        if weights == "trained":
            model.load_state_dict(self.trained(variant))
        with torch.no_grad():
            e = model.embedding(batch(shape, self.device)[:, :-1])
            z = model.initial_state(shape[0]).z.clone()
        return model.dynamics, z, e, model.config.naturalization_strength

    def gap(self) -> None:
        from pararnn import drm

        def run(variant: str, weights: str, dt: float) -> Row:
            shape = self.shape((2, 512))
            problem = self.problem(variant, weights, dt, shape)
            lengths = [n for n in LENGTHS if n <= shape[1]]
            gaps = drm.block_gap(*problem, lengths)
            say(f"gap {variant} {weights} dt={dt}: {gaps}")
            row: Row = {"variant": variant, "weights": weights, "dt": dt, "shape": shape}
            return {**row, "gap": gaps}

        self.rows("gap", GAPS[:: 3 if self.smoke else 1], run)

    def rollout(self) -> None:
        from pararnn import drm

        def run(variant: str, weights: str, dt: float) -> Row:
            shape = self.shape(ROLLOUT)
            dynamics, z, e, s = self.problem(variant, weights, dt, shape)
            row: Row = {"variant": variant, "weights": weights, "dt": dt, "shape": shape}

            @torch.no_grad()
            def loop() -> Tensor:
                return drm.recurrent_states(dynamics, z, e, s, measure=False).states

            want = loop()
            row["loop"] = self.clock.pair(loop)
            row["norm"] = float(want.norm(dim=-1).max())
            row["step"] = float(want.diff(dim=1).norm(dim=-1).mean())
            row["windows"] = {}
            for window in [8] if self.smoke else WINDOWS:

                @torch.no_grad()
                def sweep(estimate: bool = False, window: int = window) -> Any:
                    return drm.sweep_states(
                        dynamics, z, e, s, window=window, max_corrections=window // 2,
                        estimate=estimate,
                    )  # fmt: skip

                found = sweep(estimate=True)
                row["windows"][window] = {
                    "corrections": sum(found.corrections),
                    "looped": sum(found.looped),
                    "time": self.clock.pair(sweep),
                    "error": float((found.states - want).abs().max()),
                    "remainder": found.remainder,
                    "error_estimate": found.error_estimate,
                }
            said = {w: (v["corrections"], v["looped"], v["time"]["median"], v["error"],
                        v["error_estimate"]) for w, v in row["windows"].items()}  # fmt: skip
            say(
                f"rollout {variant} {weights} dt={dt}: loop {row['loop']['median']}, windows {said}"
            )
            return row

        self.rows("rollout", ROLLOUTS[:: 3 if self.smoke else 1], run)

    def gradient(self) -> None:
        from pararnn import drm

        def run(variant: str, weights: str, dt: float) -> Row:
            shape = self.shape(ROLLOUT)
            dynamics, z, e, s = self.problem(variant, weights, dt, shape)
            bar = drawn((*shape, z.shape[1]), self.device)
            leaves = [p for p in dynamics.parameters() if p.requires_grad]
            kept: list[Any] = []

            def loop() -> Any:
                states = drm.recurrent_states(dynamics, z, e, s, measure=False).states
                return torch.autograd.grad((states * bar).sum(), leaves, allow_unused=True)

            def parallel() -> Any:
                found = drm.sweep_states(dynamics, z, e, s, window=8 if self.smoke else 64,
                                         max_corrections=32)  # fmt: skip
                grads = torch.autograd.grad((found.states * bar).sum(), leaves, allow_unused=True)
                kept[:] = [found]
                return grads

            pairs = zip(loop(), parallel(), strict=True)
            worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs
                        if a is not None and b is not None)  # fmt: skip
            row: Row = {"variant": variant, "weights": weights, "dt": dt, "shape": shape,
                        "loop": self.clock.pair(loop), "parallel": self.clock.pair(parallel),
                        "corrections": kept[0].corrections, "backward": kept[0].backward,
                        "difference": worst}  # fmt: skip
            say(f"gradient {variant} {weights} dt={dt}: loop {row['loop']['median']}, parallel "
                f"{row['parallel']['median']}, corrections {row['corrections']} and "
                f"{row['backward']}, difference {worst:.1e}")  # fmt: skip
            return row

        picked = [c for c in ROLLOUTS if c[0] == "J" and c[2] <= 0.08]
        self.rows("gradient", picked[:: 2 if self.smoke else 1], run)
