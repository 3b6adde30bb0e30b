"""Figures of the documentation's pages: one style on matplotlib, and SVG that goes into the page.

The text and the axes have the colour of the page's text, the lines mid-tones that are readable on light
and on dark. Text stays text. The output is deterministic: ids depend on the figure's name, there is no
date, and numbers are rounded to what a reader can see.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree

from harness import ROOT
from matplotlib import rc_context, rcParams
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

COLOURS = ("#4a86d8", "#2a9d8f", "#b58900", "#d9662c", "#d33682")
BLUE, GREEN, YELLOW, ORANGE, PINK = COLOURS
INK = "#010203"  # stands for the colour of the page's text
WIDTH, HEIGHT = 360, 290
LEFT, RIGHT, TOP, BOTTOM = 48, 18, 50, 46
LINE = 15  # height of a line of text
STYLE = {
    "svg.fonttype": "none",
    "font.size": 12.5,
    "axes.labelsize": 12.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    "grid.linewidth": 1.0,
    "ytick.major.size": 0.0,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.2,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color",
         "grid.color"), INK
    ),
}  # fmt: skip
rcParams.update(STYLE)
SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"
Points = Iterable[tuple[float, float]]


def power(exponent: int) -> str:
    return "10" + str(exponent).translate(str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"))


def box(top: float) -> tuple[float, float, float, float]:
    """A panel that begins so far below the figure's top."""
    size = (WIDTH - LEFT - RIGHT) / WIDTH, (HEIGHT - top - BOTTOM) / HEIGHT
    return LEFT / WIDTH, BOTTOM / HEIGHT, *size


class Plot:
    """One panel. ``text`` says in words what it shows; with ``log``, the values upwards are powers of
    ten from ``y[0]`` to ``y[1]``. ``axes`` are matplotlib's."""

    def __init__(
        self,
        title: str,
        text: str,
        x: tuple[float, float],
        y: tuple[float, float],
        log: bool = False,
        every: int = 1,
    ):
        self.text, self.y = text, y
        self.figure = Figure((WIDTH / 72, HEIGHT / 72), facecolor="none")
        self.figure.text(LEFT / WIDTH, 1 - 13 / HEIGHT, title, weight="bold")
        self.axes = self.figure.add_axes(box(TOP), facecolor="none")
        self.axes.tick_params(length=4, pad=4)
        self.axes.tick_params("y", length=0, pad=6)
        self.axes.minorticks_off()
        self.axes.set_xlim(*x)
        self.axes.set_ylim(*y)
        self.log = log
        if log:
            low, high = map(int, y)
            self.up([(p, power(p)) for p in range(low, high + 1, every)])

    def at(self, value: float) -> float:
        """A value on the scale upwards, kept inside the panel."""
        value = math.log10(max(value, 1e-30)) if self.log else value
        return min(max(value, self.y[0]), self.y[1])

    def up(self, ticks: Sequence[tuple[float, str]]) -> None:
        self.axes.set_yticks([v for v, _ in ticks], [name for _, name in ticks])

    def across(self, ticks: Sequence[tuple[float, str]], label: str) -> None:
        self.axes.set_xticks([v for v, _ in ticks], [name for _, name in ticks])
        self.axes.set_xlabel(label)

    def line(self, points: Points, colour: str, dots: bool = True, **more: object) -> None:
        x, y = zip(*((x, self.at(y)) for x, y in points), strict=True)
        style = {"marker": "o" if dots else "", "color": colour, "clip_on": False} | more
        self.axes.plot(x, y, **style)

    def level(self, value: float, label: str) -> None:
        """A dotted line across, with its name below."""
        y = self.at(value)
        self.axes.axhline(y, color=INK, linestyle=(0, (1.5, 3.5)), linewidth=1, alpha=0.9)
        self.note((0, y), label, (5, -14))

    def upright(self, value: float, label: str) -> None:
        """A dashed line upwards, with its name beside its top."""
        self.axes.axvline(value, color=INK, linestyle=(0, (5, 4)), linewidth=1, alpha=0.7)
        self.note((value, 1), label, (5, -12), "data", "axes fraction")

    def note(
        self,
        at: tuple[float, float],
        text: str,
        shift: tuple[float, float] = (0, 0),
        across: str = "axes fraction",
        up: str = "data",
        **more: object,
    ) -> None:
        """Text ``shift`` points from a place."""
        self.axes.annotate(
            text, at, shift, xycoords=(across, up), textcoords="offset points", **more
        )

    def legend(self, entries: Sequence[tuple[str, str]], rows: int = 1) -> None:
        """Colours and their names, between title and panel."""
        self.axes.set_position(box(TOP + LINE * (rows - 1)))
        self.axes.legend(
            [Line2D([], [], color=colour, linewidth=3) for colour, _ in entries],
            [name for _, name in entries],
            loc="lower left",
            bbox_to_anchor=(0, 1.02),
            borderaxespad=0.2,
            borderpad=0,
            ncols=-(-len(entries) // rows),
            frameon=False,
            handlelength=1.1,
            handletextpad=0.35,
            columnspacing=0.9,
            labelspacing=0.15,
        )

    def write(self, name: str) -> tuple[Path, str]:
        """The file, and its content."""
        found = io.BytesIO()
        with rc_context({"svg.hashsalt": name}):
            FigureCanvasSVG(self.figure).print_svg(found, metadata={"Date": None})
        return ROOT / "docs" / "assets" / f"{name}.svg", inlined(found.getvalue(), self.text)


def inlined(svg: bytes, text: str) -> str:
    """What matplotlib wrote, as a part of a page: no style sheet and no ids that others may have, the
    page's font and colour, described by ``text``."""
    ElementTree.register_namespace("", SVG[1:-1])
    root = ElementTree.fromstring(svg)
    for child in [c for c in root if c.tag in (f"{SVG}metadata", f"{SVG}defs")]:
        if child.tag == f"{SVG}metadata" or child.find(f"{SVG}style") is not None:
            root.remove(child)
    for element in root.iter():
        if LINK in element.attrib:
            element.set("href", element.attrib.pop(LINK))
        if element.tag == f"{SVG}g":
            element.attrib.pop("id", None)
        for key, value in element.attrib.items():
            if key not in ("id", "href", "clip-path"):
                element.set(key, tidy(value))
        if element.get("transform", "").startswith("rotate(-0 "):
            del element.attrib["transform"]
    flatten(root)
    root.attrib = {
        "viewBox": f"0 0 {WIDTH} {HEIGHT}",
        "role": "img",
        "aria-label": text,
        "font-family": "system-ui, sans-serif",
        "stroke-linejoin": "round",
    }
    ElementTree.indent(root, "")
    return ElementTree.tostring(root, "unicode") + "\n"


def tidy(value: str) -> str:
    value = re.sub(r"font-family: [^;]*;? ?", "", value).replace(INK, "currentColor")
    value = re.sub(r"\d+\.\d+", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), value)
    return " ".join(value.split())


def flatten(element: ElementTree.Element) -> None:
    """Put the children of groups that say nothing in their place; leave out what is not drawn."""
    children: list[ElementTree.Element] = []
    for child in element:
        flatten(child)
        plain = child.tag == f"{SVG}g" and not child.attrib
        unseen = child.tag == f"{SVG}path" and child.get("style") in ("fill: none", None)
        children += list(child) if plain else [] if unseen and not child.get("id") else [child]
    element[:] = children
