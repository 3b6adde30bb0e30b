"""The command ``pararnn``: list the cells, show a card, verify a cell here, probe what a model
learns, open the catalog.

Answers go to standard output, progress and problems to standard error. The exit status is 0, 1 if
a verification fails, and 2 if the command cannot be carried out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import _clients
from .commands import Problem, device, nearest, positive, progress, seed

if TYPE_CHECKING:
    from torch import nn

DTYPES = ("float64", "float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks ⊙ shows ? and goes on
            stream.reconfigure(errors="replace")
    options = _parser().parse_args(arguments)
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except Problem as problem:
        print(f"pararnn: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pararnn: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    from . import __version__

    parser = argparse.ArgumentParser(
        prog="pararnn", description="Recurrent cells that train in parallel over time."
    )
    parser.add_argument("--version", action="version", version=f"pararnn {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = commands.add_parser("list", help="the cells of this version, and the parts of models")
    command.set_defaults(run=_list)

    command = commands.add_parser("show", help="the card of a cell or part")
    command.add_argument("cell", metavar="CELL", help="a name from 'pararnn list', or module:name")
    command.add_argument("--markdown", action="store_true", help="as Markdown, with LaTeX")
    command.set_defaults(run=_show)

    command = commands.add_parser(
        "verify", help="compare parallel and sequential on this machine",
        description="Compares the parallel solve of a cell with its sequential loop, here and now. "
        "The exit status is 1 if they disagree.",
    )  # fmt: skip
    command.add_argument(
        "cell", metavar="CELL", help="a name from 'pararnn list', or module:factory of your own"
    )
    command.add_argument("--device", default="cpu", help="e.g. cuda (default: cpu)")
    command.add_argument("--dtype", default="float32", choices=DTYPES)
    command.add_argument("--length", type=positive, default=512, help="steps (default: 512)")
    command.add_argument("--batch", type=positive, default=4, help="sequences (default: 4)")
    command.add_argument("--width", type=positive, help="width of a registered cell's state axes")
    command.add_argument("--seed", type=seed, default=0)
    command.set_defaults(run=_verify)

    for client in _clients.modules("command"):
        client.register(commands)

    command = commands.add_parser("catalog", help="build the cell catalog and serve it")
    command.add_argument("--port", type=int, default=8000, help="0 takes any free port")
    command.add_argument("--once", action="store_true", help="only build")
    command.set_defaults(run=_catalog)
    return parser


# -- commands ----------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> int:
    from .cards import card, part_names
    from .cells import cell_names

    rows = [["CELL", "JACOBIAN", "FIDELITY", "PARALLEL PATH"]]
    for name in (*cell_names(), *part_names()):
        for line in card(name).rows:
            structure = line.structure[0] if line.structure else "-"
            rows.append([line.name, structure, " / ".join(line.fidelity), line.path])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip())
    return 0


def _show(options: argparse.Namespace) -> int:
    from .cards import card_markdown, card_text

    subject = _imported(options.cell) if ":" in options.cell else _shown(options.cell)
    if ":" in options.cell and isinstance(subject, str):  # which is no name here
        raise Problem(f"{options.cell}: got str, expected a cell, or a function that gives one.")
    try:
        if options.markdown:
            print(card_markdown(subject), end="")
        else:
            print(card_text(subject, min(shutil.get_terminal_size().columns, 100)), end="")
    except TypeError as error:
        raise Problem(f"{options.cell}: {error}") from None
    return 0


def _verify(options: argparse.Namespace) -> int:
    names = [options.cell] if ":" in options.cell else _variants(options.cell)
    if options.width and ":" in options.cell:
        raise Problem(f"{options.cell}: --width is for registered cells; the factory decides.")
    import torch

    from . import layers

    where, dtype = device(options.device), getattr(torch, options.dtype)
    passed = True
    for name in names:
        torch.manual_seed(options.seed)
        module = _module(name, options.width).to(device=where, dtype=dtype)
        width = _input_width(module, name)
        x = torch.randn(options.batch, options.length, width, dtype=dtype, device=where)
        dt = None
        if layers.takes_gaps(module):
            dt = 2 * torch.rand(options.batch, options.length, dtype=dtype, device=where)
        shape = f"{options.batch} × {options.length} × {width}"
        progress(f"{name}: inputs {shape}, {options.dtype}, {where}: parallel, then the loop")
        try:
            report = layers.verify_agreement(module, x, dt=dt)
        except (TypeError, ValueError) as error:
            raise Problem(f"{name}: {error}") from None
        print(report)
        passed &= report.passed
    progress(
        "The whole contract, from a clone: pytest conformance "
        + " ".join(f"--cell '{name}'" for name in names)
        + (f" --device {where.type}" if where.type != "cpu" else "")
    )
    return 0 if passed else 1


def _catalog(options: argparse.Namespace) -> int:
    root = Path(__file__).resolve().parent.parent
    builder = root / "tools" / "catalog.py"
    if not (builder.is_file() and (root / "mkdocs.yml").is_file()):
        raise Problem(
            "the catalog is built from a clone of the repository, with 'make catalog'; this is an "
            "installed package. 'pararnn list' and 'pararnn show CELL' work here."
        )
    import importlib.util

    if importlib.util.find_spec("mkdocs") is None:
        raise Problem(
            f"mkdocs is not installed in this environment; run 'make catalog' in {root}, which "
            "sets up its own."
        )
    progress("building the catalog (a quarter of a minute)")
    command = [sys.executable, str(builder), "--port", str(options.port)]
    return subprocess.run([*command, *(["--once"] if options.once else [])], cwd=root).returncode


# -- finding what is meant ---------------------------------------------------------------------


def _shown(name: str) -> str:
    from .cards import find_part, part_names

    return name if find_part(name) else _registered(name, part_names())


def _registered(name: str, parts: Sequence[str] = ()) -> str:
    """The name of a cell; one of the parts is also what may have been meant."""
    from .cards import find_part
    from .cells import cell_names, get_cell

    try:
        get_cell(name)
    except KeyError:
        part = find_part(name)
        if part:
            check = f" From a clone, '{part.checked_by}' checks it." if part.checked_by else ""
            raise Problem(
                f"got {name!r}, a part of the {part.family}, expected a cell.{check}"
            ) from None
        bare = [known.partition("[")[0] for known in cell_names()]
        expected = ", ".join([*cell_names(), *parts])
        raise Problem(
            f"got {'name' if parts else 'cell'} {name!r}, expected one of {expected}, or "
            f"module:factory for a cell of your own."
            f"{nearest(name, [*cell_names(), *bare, *parts])}"
        ) from None
    return name


def _imported(text: str) -> object:
    """The object that ``module:name`` names; the current folder is searched too, after everything
    that is installed, so that no file in it takes the place of a module."""
    import importlib

    module_name, _, name = text.partition(":")
    if not (name and all(part.isidentifier() for part in module_name.split("."))):
        raise Problem(f"got {text!r}, expected module:name, e.g. my_cells:MyCell.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except ImportError as error:
        raise Problem(
            f"{text}: {error}; run this where {module_name.split('.')[0]!r} can be imported from."
        ) from None
    if not hasattr(found, name):
        raise Problem(f"{text}: the module {module_name!r} has no {name!r}.")
    subject = getattr(found, name)
    if hasattr(subject, "spec") or hasattr(subject, "drive_list"):  # a cell, its class, or a Spec
        return subject
    return _called(text, subject)


def _called(text: str, factory: object) -> object:
    if not callable(factory):
        raise Problem(
            f"{text}: got {type(factory).__name__}, expected a function that gives a cell."
        )
    try:
        return factory()
    except TypeError as error:
        raise Problem(f"{text}: {error}; expected a factory that needs no arguments.") from None


def _variants(name: str) -> list[str]:
    """Registered names that are meant: all variants of a cell, or the one that is named."""
    from .cells import cell_names, get_cell

    chosen = get_cell(_registered(name))
    if name == chosen.name:
        return [name]
    return [other for other in cell_names() if get_cell(other).slug == chosen.slug]


def _module(name: str, width: int | None) -> nn.Module:
    """The cell to verify, from the registry or from what the user names."""
    from torch import nn

    if ":" not in name:
        from .cells import get_cell

        try:
            return get_cell(name).factory(16, **({"width": width} if width else {}))
        except ValueError as error:
            raise Problem(f"{name}, --width {width}: {error}") from None
    made = _imported(name)
    if isinstance(made, type):
        made = _called(name, made)
    if not isinstance(made, nn.Module):
        raise Problem(
            f"{name}: got {type(made).__name__}, expected a factory that gives a cell or a model "
            "with ParaRNN layers."
        )
    return made


def _input_width(module: nn.Module, text: str) -> int:
    for name in ("d_in", "input_size"):
        width = getattr(module, name, None)
        if isinstance(width, int):
            return width
    raise Problem(
        f"{text}: the module says neither d_in nor input_size, so its input is unknown; call "
        "pararnn.verify_agreement(module, x) with an input of yours."
    )


if __name__ == "__main__":
    sys.exit(main())
