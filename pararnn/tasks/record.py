"""The record of a run on disk: what was seen so far, as JSON lines, and what it takes to go on."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class Record:
    """Two files of one run in a folder, which is made if it is not there.

    ``NAME.jsonl`` has the settings of the run, a line a check, and at the end the result; or, if the
    run was stopped, a line that says so and that this is a part of a run. A run that is going on, or was
    killed, has neither. ``NAME.pt``, there until the result is, is the state after the last check.
    Both are replaced as a whole, so none is ever half written.

    Parameters
    ----------
    folder
        Where.
    settings
        Everything that decides the result, as plain data; ``task, model, n_layers, seed`` name the files.
    """

    def __init__(self, folder: str | os.PathLike[str], settings: Mapping[str, Any]):
        self.settings = json.loads(json.dumps(settings, default=str))
        name = "{task}-{model}-L{n_layers}-seed{seed}".format(**settings)
        stem = Path(folder) / re.sub(r"[^\w.+-]", "_", name)
        self.lines, self.checkpoint = Path(f"{stem}.jsonl"), Path(f"{stem}.pt")
        self.lines.parent.mkdir(parents=True, exist_ok=True)

    def found(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The result of the run, or else the state to go on from, where there is one.

        Raises
        ------
        ValueError
            If the files are of a run with other settings, or on another machine.
        """
        if not self.lines.exists():
            return None, None
        events = [json.loads(line) for line in self.lines.read_text("utf-8").splitlines()]
        self._same(events[0] if events else {})
        if events[-1]["event"] == "result":
            return events[-1]["result"], None
        if not self.checkpoint.exists():
            return None, None
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        self._same(json.loads(state.pop("settings")))
        return None, state

    def _same(self, settings: Mapping[str, Any]) -> None:
        theirs = {k: v for k, v in settings.items() if k != "event"}
        names = {*theirs, *self.settings}
        other = sorted(k for k in names if theirs.get(k) != self.settings.get(k))
        if other:
            raise ValueError(
                f"record: got {self.lines} of a run whose {', '.join(other)} differ, expected those of "
                "this run; give another folder, or remove the file."
            )

    def save(self, state: Mapping[str, Any], checks: Sequence[Mapping[str, Any]]) -> None:
        """The state after a check, and all checks so far."""
        with _replacing(self.checkpoint) as path:
            torch.save({**state, "settings": json.dumps(self.settings)}, path)
        self._write(checks)

    def stopped(self, step: int, checks: Sequence[Mapping[str, Any]]) -> None:
        """That the run was stopped in a step."""
        last = checks[-1]["step"] if checks else 0
        note = f"partial: no result; the same run with this record goes on after step {last}"
        self._write(checks, {"event": "stopped", "step": step, "kept": last, "note": note})

    def finished(self, result: Mapping[str, Any], checks: Sequence[Mapping[str, Any]]) -> None:
        """The result, after which there is nothing to go on with."""
        self._write(checks, {"event": "result", "result": result})
        self.checkpoint.unlink(missing_ok=True)

    def _write(self, checks: Sequence[Mapping[str, Any]], *last: Mapping[str, Any]) -> None:
        events = (
            {"event": "run", **self.settings},
            *({"event": "check", **c} for c in checks),
            *last,
        )
        with _replacing(self.lines) as path:
            path.write_text("".join(json.dumps(e) + "\n" for e in events), "utf-8")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of ``path`` once it is whole."""
    new = path.with_name(f"{path.name}.new")
    try:
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
