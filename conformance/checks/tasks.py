"""The clause about the probe tasks: answers can be read off the sequence."""

from __future__ import annotations

import numpy as np
import torch

from pararnn import tasks
from pararnn.drm import mqar
from pararnn.testing.context import Context

from ..task_oracles import NOISE, ORACLES, pendulum
from . import checks

ROWS = 24


@checks("task-answers")
def answers(ctx: Context) -> None:
    text = tasks.Task("MQAR-text", mqar.recall_sequences, mqar.VOCABULARY, mqar.VOCABULARY, 0.0)
    for task in (*tasks.TASKS.values(), text):
        protocol = tasks.PROTOCOLS.get(task.name, tasks.WORDS)
        settings = [(e.length, e.options) for e in (protocol.check, *protocol.final)]
        if task is text:
            settings = [(4, {}), (39, {}), (159, {})]
        for length, options in settings if ctx.exhaustive else settings[:3]:
            with ctx.explained(f"{task.name}, length {length} {dict(options)}"):
                seen = task.draw(ctx.generator, ROWS, length, **options)
                if task.symbols:
                    read(ctx, task.name, seen)
                else:
                    fitted(ctx, seen)
    for name, protocol in {"words": tasks.WORDS, **tasks.PROTOCOLS}.items():
        judging = {protocol.fitted.seed, *(e.seed for e in protocol.final)}
        both = judging & {protocol.check.seed, protocol.validation.seed}
        ctx.require(not both, f"{name}: got seeds {both} that choose weights and judge them")


def read(ctx: Context, name: str, seen: tasks.Batch | mqar.Recall) -> None:
    """All answers are those of every oracle."""
    asked = torch.ones_like(seen.x, dtype=torch.bool) if seen.asked is None else seen.asked
    wanted = [row[a].tolist() for row, a in zip(seen.y, asked, strict=True)]
    dt = getattr(seen, "dt", None)
    gaps = [None] * len(seen.x) if dt is None else dt.tolist()
    for oracle in ORACLES.get(name, ()):
        rows = zip(seen.x.tolist(), gaps, asked.tolist(), strict=True)
        said = [oracle(*row) for row in rows]
        right = np.mean(
            [a == b for s, w in zip(said, wanted, strict=True) for a, b in zip(s, w, strict=True)]
        )
        ctx.require(right == 1.0, f"got a score of {right:.4f} of {oracle.__name__}, expected 1")
    ctx.require(name in ORACLES, f"got no oracle of {name}, expected one")


def fitted(ctx: Context, seen: tasks.Batch) -> None:
    """Answers are one swing, to rounding; and the noisy inputs tell which, as well as they can."""
    x, y, dt = (v.double().numpy() for v in (seen.x, seen.y, seen.dt))
    ctx.within(
        "answers − the nearest swing",
        float(np.abs(pendulum(y[:, :64], dt[:, :64], 30) - y[:, :64]).max()),
        1e-6,
    )
    error = np.square(pendulum(x, dt, 6) - y).mean()
    ctx.within("error of an oracle / (noise² / T)", float(error) / NOISE**2 * x.shape[1], 2.0)
