"""Samples mutants of the package and says which of them the tests notice: `make mutants`.

A mutant is one small change: a comparison, an operator, a constant, the end of a slice, a condition,
two arguments, a keyword or a statement. Every one is run against the tests that guard its file,
those named after it first, until one fails. Workers have a copy of the repository each; a test
process is forked from one that has imported the large libraries already.

    python tools/mutants.py --jobs 16            # all folders; goes on where it was stopped
    python tools/mutants.py --folders kernels    # the Triton interpreter needs NumPy < 2.4
    python tools/mutants.py --list               # only print what is sampled
    python tools/mutants.py --report             # run none: the table, and survivors with reasons
    python tools/mutants.py --again ID … --guards tests/…::test_…   # one test for a survivor

Results are lines of JSON in `tests/mutants/results.jsonl`; `tests/mutants/README.md` lists the
survivors with their reasons, which are written by hand into `tests/mutants/reasons.json`, a kind of
`KINDS` first. A survivor without one is an error.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "tests" / "mutants"
RESULTS, REASONS, PAGE = HOME / "results.jsonl", HOME / "reasons.json", HOME / "README.md"
FOLDERS = ("solvers", "scan", "spec", "layers", "kernels")
# Tests of other folders that guard a folder, too; its own come first.
GUARDS = {
    "solvers": ("tests/property/test_cells.py", "tests/layers/test_para_rnn.py",
                "tests/property/test_specs.py"),
    "scan": ("tests/property/test_scans.py", "tests/property/test_cells.py"),
    "spec": ("tests/property/test_specs.py", "tests/solvers/test_own_cells.py",
             "tests/cards/test_parts.py"),
    "layers": ("tests/property/test_layers.py",),
    "kernels": (),
}  # fmt: skip
TEST_NAMES = {
    "api": "solution", "config": "config", "adjoint": "derivatives", "fused": "scans",
    "walk": "kernels", "walk_back": "kernels", "reduce": "kernels", "tuples": "kernels",
    "launch": "kernels", "memory": "kernels", "body": "source", "programs": "source",
    "plan": "source", "backends": "programs", "forward": "programs", "backward": "programs",
    "tangent": "programs", "factorization": "programs", "python": "programs", "triton": "programs",
    "torch_backend": "programs", "enclosure": "certificate_rounding", "chunks": "affine",
    "problem": "solution", "operator": "operators", "spec_recurrence": "programs",
    "module_recurrence": "modules", "shooting": "engine", "sequential": "solution",
    "newton": "solution", "scan": "linear", "results": "solution", "method": "solution",
    "scans": "linear", "walkers": "engine", "repair": "ranges", "cuts": "delta_resets",
    "builder": "authoring", "program": "programs", "complements": "complements",
}  # fmt: skip
"""The word in the name of the test file, for modules whose tests are called otherwise."""
COPIED = ("pararnn", "tests", "conformance", "tools", "benchmarks", "conftest.py", "pyproject.toml")
LONGEST = 600
"""Seconds for one test file without a mutant."""
LEAST = 300
"""Mutants with a result, below which the report is an error."""
KINDS = {
    "equivalent": "no input tells it from the source",
    "tuning": "it changes time, memory, a margin on the safe side or which of two right ways is taken",
    "open": "it should be noticed, and is not",
}


# -- changes ---------------------------------------------------------------------------------------

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.MatMult: ast.Mult,
}  # fmt: skip
NAMES = {
    "any": "all", "all": "any", "min": "max", "max": "min", "amax": "amin", "amin": "amax",
    "zeros": "ones", "zeros_like": "ones_like", "ones_like": "zeros_like", "minimum": "maximum",
    "maximum": "minimum", "cumsum": "cumprod", "floor": "ceil", "ceil": "floor", "sin": "cos",
    "cos": "sin", "exp": "expm1", "log": "log1p", "clone": "detach", "detach": "clone",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A replacement of characters ``start`` to ``stop`` (bytes of the file) by ``text``."""

    id: str
    file: str
    line: int
    operator: str
    before: str
    after: str
    start: int
    stop: int
    text: str


def variants(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Changes of a node: the name of the operator, the node that it replaces, and new source."""

    def source(change: Any) -> str:
        copy = ast.parse(ast.unparse(node), mode="eval").body
        change(copy)
        return f"({ast.unparse(copy)})"

    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        new = COMPARISONS[type(node.ops[0])]
        yield "comparison", node, source(lambda n: n.ops.__setitem__(0, new()))
    text = isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant | ast.JoinedStr)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        new_op = OPERATORS[type(node.op)]
        if not (text and isinstance(node.op, ast.Mod)):
            yield "arithmetic", node, source(lambda n: setattr(n, "op", new_op()))
    if isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield "boolean", node, source(lambda n: setattr(n, "op", other()))
        yield "boolean", node, f"({ast.unparse(node.values[0])})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield "sign", node, f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.Constant):
        value = node.value
        if isinstance(value, bool):
            yield "constant", node, repr(not value)
        elif isinstance(value, int):
            yield "constant", node, repr(value + 1)
        elif isinstance(value, float):
            yield "constant", node, repr(2 * value if value else 1.0)
    if isinstance(node, ast.Slice):
        if node.lower is not None:
            yield "slice", node.lower, f"({ast.unparse(node.lower)}) + 1"
        if node.upper is not None:
            yield "slice", node.upper, f"({ast.unparse(node.upper)}) - 1"
    if isinstance(node, ast.IfExp | ast.If | ast.While):
        yield "condition", node.test, f"(not ({ast.unparse(node.test)}))"
    if isinstance(node, ast.Call):
        plain = [a for a in node.args if not isinstance(a, ast.Starred)]
        if len(plain) == len(node.args) >= 2:
            yield (
                "arguments",
                node,
                source(lambda n: n.args.__setitem__(slice(0, 2), n.args[1::-1])),
            )
        for i, keyword in enumerate(node.keywords):
            if keyword.arg:
                yield "keyword", node, source(lambda n, i=i: n.keywords.pop(i))
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
        if name in NAMES:

            def rename(n: Any) -> None:
                setattr(n.func, "attr" if isinstance(n.func, ast.Attribute) else "id", NAMES[name])

            yield "name", node, source(rename)
    call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if isinstance(node, ast.AugAssign | ast.Raise) or call:
        yield "statement", node, "pass"
    if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        target, value = ast.unparse(node.target), ast.unparse(node.value)
        yield "assignment", node, f"{target} = {value}"


def visited(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that compute something: no annotations, messages, decorators or declarations."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "extra_repr", "__str__"):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from visited(child)


def mutants(path: Path) -> list[Mutant]:
    """All mutants of a file."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found, seen = [], {}
    file = path.relative_to(ROOT).as_posix()
    for node in visited(ast.parse(source)):
        for operator, target, text in variants(node):
            start = starts[target.lineno - 1] + target.col_offset
            stop = starts[target.end_lineno - 1] + target.end_col_offset
            before = " ".join(source[start:stop].decode().split())
            key = (file, operator, before, text)
            seen[key] = seen.get(key, 0) + 1
            digest = hashlib.sha1(repr((*key, seen[key])).encode()).hexdigest()[:10]
            after = " ".join(text.split())
            found.append(
                Mutant(digest, file, target.lineno, operator, before, after, start, stop, text)
            )
    return found


def valid(mutant: Mutant) -> bool:
    """Whether the changed file is Python, and another program."""
    source = (ROOT / mutant.file).read_bytes()
    changed = source[: mutant.start] + mutant.text.encode() + source[mutant.stop :]
    try:
        return ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def sites(folder: str) -> dict[str, Mutant]:
    """All mutants of a folder by their names, which a change elsewhere in the file leaves alone."""
    paths = sorted((ROOT / "pararnn" / folder).rglob("*.py"))
    return {m.id: m for path in paths for m in mutants(path)}


def sample(number: int, seed: int, known: Container[str] = ()) -> list[Mutant]:
    """As many of every folder, in the order of the files: those ``known``, then by chance."""
    out: list[Mutant] = []
    for folder in FOLDERS:
        found = sites(folder)
        chance = {i: hashlib.sha1(f"{seed}/{i}".encode()).hexdigest() for i in found}
        order = sorted(found, key=lambda i: (i not in known, chance[i]))
        good = (found[i] for i in order if i in known or valid(found[i]))
        out += itertools.islice(good, -(-number // len(FOLDERS)))
    return sorted(out, key=lambda m: (m.file, m.line, m.id))


def named(file: str) -> str:
    """The word that the names of a file's own tests have."""
    stem = Path(file).stem.strip("_")
    return TEST_NAMES.get(stem, stem)


def guards(file: str, root: Path = ROOT) -> list[str]:
    """Test files for a file of the package: those named after it, its folder's, and others."""
    _, folder, *_ = Path(file).parts
    word = named(file)
    own = sorted((root / "tests" / folder).glob("test_*.py"), key=lambda p: (p.stat().st_size, p))
    own.sort(key=lambda p: word not in p.stem)
    paths = [p.relative_to(root).as_posix() for p in own]
    return paths + [p for p in GUARDS.get(folder, ()) if (root / p).exists()]


# -- running ---------------------------------------------------------------------------------------


class First:
    """A plugin of pytest that keeps the first test that failed, and all if asked to."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid or "collection")


def child(copy: Path, arguments: list[str], result: Path) -> None:
    """Run pytest in a forked process, in the copy."""
    import pytest

    os.setsid()
    os.chdir(copy)
    sys.path[:] = [str(copy), str(copy / "tools"), *(p for p in sys.path if Path(p) != ROOT)]
    os.environ["PYTHONPATH"] = str(copy)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    first = First()
    try:
        import pararnn

        if not Path(pararnn.__file__).is_relative_to(copy):
            first.failed.append(f"not the copy: {pararnn.__file__}")
            code = 3
        else:
            code = int(pytest.main(arguments, plugins=[first]))
    except BaseException as error:
        code, first.failed = 1, [f"import: {type(error).__name__}: {error}"[:200]]
    result.write_text(json.dumps({"code": code, "failed": first.failed}))
    os._exit(0)


def outcome_of(
    copy: Path, paths: list[str], deselected: list[str], seconds: float, every: bool = False
) -> tuple[str, list[str]]:
    """Whether tests pass in a copy: ``("passed" | "failed" | "timeout", failed tests)``."""
    result = copy / "result.json"
    result.unlink(missing_ok=True)
    arguments = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not browser", *paths]
    arguments += [] if every else ["-x"]
    arguments += [f"--deselect={name}" for name in deselected]
    pid = os.fork()
    if pid == 0:
        child(copy, arguments, result)
    end = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "timeout", []
        time.sleep(0.02)
    if not result.exists():
        return "failed", ["the process died"]
    found = json.loads(result.read_text())
    return ("passed" if found["code"] == 0 else "failed"), found["failed"]


def copied() -> Path:
    """A copy of what tests need. Its bytecode stays valid: a mutant has a time of its own."""
    copy = Path(tempfile.mkdtemp(prefix="mutants-"))
    ignore = shutil.ignore_patterns("__pycache__", "results")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=ignore)
        elif source.exists():
            shutil.copy2(source, copy / name)
    return copy


def prepare() -> None:
    """What every forked process has from the start."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HYPOTHESIS_PROFILE", "ci")
    os.environ.setdefault("PARARNN_EXAMPLES", "50")
    import mpmath  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import sympy  # noqa: F401
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def affordable(file: str, baseline: dict[str, Any], budget: float) -> list[str]:
    """The guards that are run: those named after the file, then the quickest, while they take no
    longer together than ``budget`` seconds."""
    word = named(file)
    paths = [p for p in guards(file) if p in baseline] or list(baseline)
    paths.sort(key=lambda p: (word not in Path(p).stem, baseline[p]["seconds"]))
    total, chosen = 0.0, []
    for path in paths:
        total += baseline[path]["seconds"]
        if not chosen or word in Path(path).stem or total <= budget:
            chosen.append(path)
    return chosen


def work(tasks: Any, done: Any, baseline: dict[str, Any], budget: float) -> None:
    """Take mutants (or test files, for the baseline) until there are no more."""
    prepare()
    copy = copied()
    try:
        while (task := tasks.get()) is not None:
            begin = time.monotonic()
            if isinstance(task, str):
                outcome, failed = outcome_of(copy, [task], [], LONGEST, every=True)
                done.put((task, outcome, failed, time.monotonic() - begin))
                continue
            path = copy / task.file
            original, times = path.read_bytes(), path.stat().st_mtime_ns
            path.write_bytes(original[: task.start] + task.text.encode() + original[task.stop :])
            os.utime(path, ns=(times, times - 10**9 * (1 + int(task.id, 16) % 10**6)))
            paths = affordable(task.file, baseline, budget)
            usual = sum(baseline[p]["seconds"] for p in paths)
            skipped = [name for p in paths for name in baseline[p]["failed"]]
            outcome, failed = outcome_of(copy, paths, skipped, 20 + 3 * usual)
            path.write_bytes(original)
            os.utime(path, ns=(times, times))
            done.put((task, outcome, failed, time.monotonic() - begin))
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def run(
    tasks: list[Any], jobs: int, baseline: dict[str, Any], budget: float = 0.0
) -> Iterator[tuple]:
    """Results as they come."""
    context = multiprocessing.get_context("spawn")
    waiting, done = context.Queue(), context.Queue()
    for task in [*tasks, *[None] * jobs]:
        waiting.put(task)
    workers = [
        context.Process(target=work, args=(waiting, done, baseline, budget)) for _ in range(jobs)
    ]
    for worker in workers:
        worker.start()
    for _ in tasks:
        yield done.get()
    for worker in workers:
        worker.join()


# -- results ---------------------------------------------------------------------------------------


def loaded() -> dict[str, dict[str, Any]]:
    if not RESULTS.exists():
        return {}
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines() if line.strip()]
    return {row["id"]: row for row in rows}


def reasons() -> dict[str, str]:
    return json.loads(REASONS.read_text()) if REASONS.exists() else {}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Counts of every folder."""
    why = reasons()
    kind_of = lambda r: why.get(r["id"], "").partition(":")[0]  # noqa: E731
    heads = ("folder", "sampled", "killed", "timed out", "survived", *KINDS)
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for folder in (*FOLDERS, "all"):
        here = [r for r in rows if folder in ("all", r["file"].split("/")[1])]
        left = [r for r in here if r["outcome"] == "survived"]
        counts = [len(here)]
        counts += [sum(r["outcome"] == o for r in here) for o in ("killed", "timeout", "survived")]
        counts += [sum(kind_of(r) == kind for r in left) for kind in KINDS]
        lines.append(f"| {folder} | " + " | ".join(map(str, counts)) + " |")
    return lines


def page(rows: list[dict[str, Any]]) -> str:
    """The table, and the survivors with their reasons."""

    def code(text: str) -> str:
        text = text if len(text) < 90 else text[:87] + "..."
        return "`" + text.replace("|", "\\|").replace("`", "'") + "`"

    why = reasons()
    lines = ["# Mutants", "", "Written by `make mutants`; reasons are in `reasons.json`.", ""]
    lines += [*table(rows), "", *(f"- {kind}: {said}." for kind, said in KINDS.items()), ""]
    lines += ["## Survivors", "", "| id | where | change | reason |", "| --- | --- | --- | --- |"]
    for r in rows:
        if r["outcome"] == "survived":
            change = f"{code(r['before'])} → {code(r['after'])}"
            where = f"{r['file'].removeprefix('pararnn/')}:{r['line']}"
            lines.append(f"| {r['id']} | {where} | {change} | {why.get(r['id'], '')} |")
    return "\n".join(lines) + "\n"


def report(rows: list[dict[str, Any]], changed: int) -> int:
    """Print the table and the survivors; 1 if one has no reason, or a reason no survivor."""
    why = reasons()
    left = {r["id"]: r for r in rows if r["outcome"] == "survived"}
    print("\n".join(table(rows)))
    for i, r in left.items():
        print(f"{i} {r['file']}:{r['line']} {r['before'][:60]} → {r['after'][:60]}")
        print(f"    {why.get(i, 'NO REASON')}")
    wrong = [f"{i}: survived, and has no reason" for i in left if i not in why]
    wrong += [f"{i}: has a reason, and did not survive" for i in why if i not in left]
    wrong += [f"{i}: got the kind {kind!r}, expected one of {', '.join(KINDS)}"
              for i in left if i in why and (kind := why[i].partition(":")[0]) not in KINDS]  # fmt: skip
    if len(rows) < LEAST:
        wrong.append(f"got {len(rows)} mutants with a result, expected {LEAST} at least; run more")
    if changed:
        print(f"{changed} results are of text that changed since, and do not count")
    print("\n".join(wrong or ["every survivor has a reason"]))
    return int(bool(wrong))


def write(rows: dict[str, dict[str, Any]], chosen: list[Mutant]) -> list[dict[str, Any]]:
    """The results of what is sampled now, and the page."""
    order = [rows[m.id] | {"line": m.line} for m in chosen if m.id in rows]
    RESULTS.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in order))
    PAGE.write_text(page(order))
    return order


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folders", nargs="+", default=list(FOLDERS), choices=FOLDERS)
    parser.add_argument("--number", type=int, default=400, help="of all folders together")
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--most", type=int, help="run only this many, spread over the sample")
    parser.add_argument("--minutes", type=float, default=1e9, help="start none after this")
    parser.add_argument("--budget", type=float, default=45, metavar="SECONDS",
                        help="of guarding tests a mutant, beside those named after its file")  # fmt: skip
    parser.add_argument("--guards", nargs="+", help="run these tests instead of the files' own")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--again", nargs="*", default=[], metavar="ID", help="run these again")
    parser.add_argument("--survivors", action="store_true", help="run survivors again")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--report", action="store_true", help="run none")
    options = parser.parse_args()
    HOME.mkdir(parents=True, exist_ok=True)
    rows = {} if options.fresh else loaded()
    whole = sample(options.number, options.seed, rows)
    chosen = [m for m in whole if m.file.split("/")[1] in options.folders]
    if options.list:
        for m in chosen:
            print(f"{m.id} {m.file}:{m.line} {m.operator}: {m.before} → {m.after}")
        return 0
    changed = len(rows.keys() - {m.id for m in whole})
    if options.report:
        return report(write(rows, whole), changed)
    again = set(options.again)
    if options.survivors:
        again |= {i for i, r in rows.items() if r["outcome"] == "survived"}
    todo = [m for m in chosen if m.id not in rows or m.id in again]
    if options.most:
        todo = random.Random(0).sample(todo, min(options.most, len(todo)))
    if not todo:
        print("nothing to run; --fresh forgets earlier results")
        return report(write(rows, whole), 0)
    end = time.monotonic() + 60 * options.minutes
    # What is expanded to files is timed file by file.
    files = options.guards or sorted({p for m in todo for p in guards(m.file)})
    baseline = {}
    for path, outcome, failed, seconds in run(files, options.jobs, {}):
        if outcome == "timeout" or "collection" in failed or any("::" not in f for f in failed):
            print(f"left out: {path}: {outcome} {failed[:1]}", flush=True)
            continue
        baseline[path] = {"seconds": seconds, "failed": failed}
        said = f", {len(failed)} fail without a mutant and do not count" if failed else ""
        print(f"baseline {path}: {seconds:.1f} s{said}", flush=True)
    count = 0
    random.Random(1).shuffle(todo)  # slow files do not come all at once
    batch = 4 * options.jobs
    for begin in range(0, len(todo), batch) if options.minutes < 1e6 else [None]:
        part = todo if begin is None else todo[begin : begin + batch]
        if time.monotonic() > end:
            break
        for m, outcome, failed, seconds in run(part, options.jobs, baseline, options.budget):
            count += 1
            state = {"passed": "survived", "failed": "killed"}.get(outcome, outcome)
            row = {k: v for k, v in asdict(m).items() if k not in ("start", "stop", "text")}
            row |= {
                "outcome": state,
                "by": failed[0] if failed else "",
                "seconds": round(seconds, 1),
            }
            rows[m.id] = row
            with RESULTS.open("a") as lines:
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
            print(f"{count}/{len(todo)} {state:8} {seconds:5.1f} s {m.file}:{m.line} {m.before[:40]!r}"
                  f" → {m.after[:40]!r} {row['by'][-60:]}", flush=True)  # fmt: skip
    return report(write(rows, whole), 0)


if __name__ == "__main__":
    sys.exit(main())
