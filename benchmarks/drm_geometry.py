"""What the DRM's diagnostics say of small models before and after training on bytes.

    PYTHONPATH=. python benchmarks/drm_geometry.py [--seeds 3] [--redraw]

Models, text and training are those of the small preset of `examples/drm_bytes.py`. In
J_NO_NATURALIZATION nothing uses the metric, so training leaves it as it was: the control of what is
said of J's. The results are committed; `--redraw` only makes the table from them.
"""

from __future__ import annotations

import argparse
from typing import Any

import report
import torch
from harness import RESULTS, Row, record, save
from report import table

from examples.drm_bytes import PRESETS, Preset, settings, text, train, validate
from pararnn.drm import (
    DRM,
    block_gap,
    effective_rank,
    fisher_energy,
    fisher_metric,
    frame_holonomy,
)

DATA = RESULTS / "drm_geometry.json"
TABLE = DATA.with_suffix(".md")
MODELS = ("J", "J_NO_NATURALIZATION")
MEASURES = {
    "nats": ("nats/byte", 3),
    "metric_rank": ("rank of G", 1),
    "path_rank": ("rank of the path", 1),
    "pullback_rank": ("rank of the pullback", 1),
    "agreement": ("agreement", 2),
    "gates": ("open gates", 2),
    "gap": ("block gap", 3),
    "turn": ("turn", 3),
}
WINDOWS, POINTS = 8, 200


@torch.no_grad()
def measure(model: DRM, held_out: torch.Tensor, preset: Preset) -> dict[str, float]:
    """The diagnostics at states on text that was not trained on, in float64."""
    nats = validate(model, held_out, preset)
    model = model.double()
    tokens = held_out[: WINDOWS * preset.length].view(WINDOWS, -1)
    out = model(tokens, trace=True)
    trace = out.trace
    moved = (out.base - out.base.mean(1, keepdim=True)).flatten(0, 1)
    spectra = {
        "metric_rank": torch.linalg.eigvalsh(trace.metric().dense()),
        "path_rank": torch.linalg.eigvalsh(moved.mT @ moved),
        "pullback_rank": torch.linalg.eigvalsh(fisher_metric(model.emitter, out.states[:, -1])),
    }
    ranks = {name: float(effective_rank(s.clamp(min=0)).mean()) for name, s in spectra.items()}
    length = trace.velocity.square().sum(-1)
    ours = (trace.energy() / length).log().flatten()
    emitted = (fisher_energy(model.emitter, out.states, trace.velocity) / length).log().flatten()
    strength, block = model.config.naturalization_strength, model.config.block_length
    start, e = model.initial_state(WINDOWS).z, model.embedding(tokens)
    return {
        "nats": nats,
        **ranks,
        "agreement": float(torch.corrcoef(torch.stack([ours, emitted]))[0, 1]),
        "gates": float(trace.gates.mean()),
        "gap": block_gap(model.dynamics, start, e, strength, (block,))[block],
        "turn": turn(model, out.base.flatten(0, 1)),
    }


def turn(model: DRM, states: torch.Tensor) -> float:
    """‖H - I‖ of the directions around an ellipse of the size of the states' spread."""
    centre = states.mean(0)
    _, sizes, axes = torch.linalg.svd(states - centre, full_matrices=False)
    angle = torch.arange(POINTS).to(states) * (2 * torch.pi / POINTS)
    one, two = axes[:2] * (sizes[:2] / len(states) ** 0.5).unsqueeze(1)
    loop = centre + angle.cos().outer(one) + angle.sin().outer(two)
    found = frame_holonomy(model.dynamics.direction(loop).vectors)
    return float(torch.linalg.matrix_norm(found - torch.eye(len(found)).to(found)))


def measured(seeds: int, preset: Preset) -> dict[str, Any]:
    data, held_out = text(preset.text)
    rows = []
    for seed in range(seeds):
        for name in MODELS:
            config = settings(name, seed, preset.sizes)
            for steps in (0, preset.steps):
                model = train(config, data, preset._replace(steps=steps))
                rows.append({"model": name, "seed": seed, "steps": steps}
                            | measure(model, held_out, preset))  # fmt: skip
                print(rows[-1], flush=True)
    about = record("python benchmarks/drm_geometry.py", "cpu", words=())
    return about | {"seeds": seeds, "preset": preset._asdict(), "rows": rows}


def drawn(found: dict[str, Any]) -> str:
    """The table of the page of open problems."""
    lines = []
    for steps in (0, found["preset"]["steps"]):
        for name in MODELS:
            rows = [r for r in found["rows"] if (r["model"], r["steps"]) == (name, steps)]
            lines.append([f"`{name}`", str(steps), *(spread(rows, key) for key in MEASURES)])
    head = ["Model", "steps", *(heading for heading, _ in MEASURES.values())]
    return table("Diagnostics before and after training", head, lines)


def spread(rows: list[Row], key: str) -> str:
    """Mean of the seeds, and their deviation."""
    return report.spread([r[key] for r in rows], MEASURES[key][1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--redraw", action="store_true", help="only the table")
    arguments = parser.parse_args()
    if not arguments.redraw:
        save(DATA, measured(arguments.seeds, PRESETS["small"]))
    TABLE.write_text(drawn(report.load(DATA)), encoding="utf-8")


if __name__ == "__main__":
    main()
