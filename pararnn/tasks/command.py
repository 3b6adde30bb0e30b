"""The command ``pararnn probe``."""

from __future__ import annotations

import argparse
from typing import Any

from pararnn.commands import Problem, device, nearest, positive, progress, seed


def register(commands: Any) -> None:
    """Add the command to the subparsers ``commands`` of ``pararnn``."""
    command = commands.add_parser(
        "probe", help="train a small model on a probe task and measure it",
        description="Trains a small model on a probe task and measures it on longer sequences. "
        "Without a model, or without a task, it lists them.",
    )  # fmt: skip
    command.add_argument("task", metavar="TASK", nargs="?", help="e.g. parity")
    command.add_argument("model", metavar="MODEL", nargs="?", help="e.g. signed")
    command.add_argument("--layers", type=positive, help="default: 1, or as the model names")
    command.add_argument("--seed", type=seed, nargs="+", default=[0], help="one run a seed")
    command.add_argument("--steps", type=positive, help="most training steps")
    command.add_argument(
        "--select", choices=("early", "best"),
        help="weights to keep: those that first reach the goal, or the best on longer sequences",
    )  # fmt: skip
    command.add_argument("--device", default="cpu", help="e.g. cuda (default: cpu)")
    command.add_argument("--json", action="store_true", help="one JSON object a run")
    command.add_argument(
        "--record", metavar="FOLDER",
        help="keep checks and states there; after a stop, the same command goes on",
    )  # fmt: skip
    command.set_defaults(run=_probe)


def _probe(options: argparse.Namespace) -> int:
    import dataclasses
    import json

    from pararnn import tasks

    if options.task is None or options.model is None:
        print("tasks: ", ", ".join(tasks.TASKS), "\nmodels:", ", ".join(tasks.MODELS))
        return 0
    changes = {"steps": options.steps, "select": options.select}
    changes = {key: value for key, value in changes.items() if value is not None}
    protocol = tasks.PROTOCOLS.get(options.task, tasks.WORDS)
    where = device(options.device)
    for number in options.seed:
        try:
            result = tasks.probe(
                options.task,
                options.model,
                seed=number,
                n_layers=options.layers,
                protocol=dataclasses.replace(protocol, **changes),
                device=where,
                watch=lambda c: progress(f"step {c.step}: loss {c.loss:.4f}, score {c.score:.4f}"),
                record=options.record,
            )
        except KeyboardInterrupt:
            kept = (
                "the same command goes on" if options.record else "nothing is kept without --record"
            )
            progress(f"no result of seed {number}: {kept}")
            raise
        except ValueError as error:
            meant = "".join(
                nearest(name, known)
                for name, known in ((options.task, tasks.TASKS), (options.model, tasks.MODELS))
                if name not in known
            )
            raise Problem(f"{error}{meant}") from None
        print(json.dumps(result.to_dict()) if options.json else result, flush=True)
    return 0
