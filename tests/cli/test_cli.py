"""The command line: what it prints where, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pararnn import cell_names, cli
from pararnn.cards import part_names

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def in_the_clone(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_list_names_every_cell(capsys):
    status, out, err = run(capsys, "list")
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()[1:]] == [*cell_names(), *part_names()]


def test_show_prints_the_card(capsys):
    status, out, _ = run(capsys, "show", "ParaM2RNN")
    assert status == 0
    assert out.startswith("ParaM2RNN\n=========\nFidelity: research-variant / paper-core\n")
    assert "Z_t = tanh(H_{t-1} W + k_t v_tᵀ)" in out
    assert "@article{mishra2026m2rnn" in out


def test_show_as_markdown(capsys):
    status, out, _ = run(capsys, "show", "para_gru", "--markdown")
    assert status == 0
    assert out.startswith("# ParaGRU\n")
    assert r"\tag{8}" in out


@pytest.mark.parametrize("name", part_names())
def test_show_a_part_of_the_drm(capsys, name):
    status, out, _ = run(capsys, "show", name)
    assert status == 0
    assert "Fidelity: notes-faithful" in out


@pytest.mark.parametrize("name", ["elman", "Elman", "factory"])
def test_show_an_own_cell(capsys, name):
    status, out, _ = run(capsys, "show", f"examples.elman:{name}")
    assert status == 0
    assert "h_t = tanh(w ⊙ h_{t-1} + W x_t + b)" in out


@pytest.mark.parametrize("cell", [*cell_names(), "examples.elman:factory"])
def test_verify(capsys, cell):
    status, out, err = run(capsys, "verify", cell, "--length", "120", "--batch", "2")
    assert status == 0
    assert out.startswith("parallel = sequential: PASS\n")
    assert f"{cell}: inputs 2 × 120" in err
    assert f"pytest conformance --cell '{cell}'" in err


def test_verify_takes_all_variants(capsys):
    status, out, _ = run(capsys, "verify", "ParaGRU", "--length", "20")
    assert status == 0
    assert out.count("PASS") == 2
    assert [line.split()[1] for line in out.splitlines() if "cell:" in line] == [
        "ParaGRU[diag]",
        "ParaGRU[head]",
    ]


def test_verify_fails_with_status_1(capsys, monkeypatch):
    import pararnn.layers

    class Report:
        passed = False

        def __str__(self) -> str:
            return "parallel = sequential: FAIL"

    monkeypatch.setattr(pararnn.layers, "verify_agreement", lambda module, x, dt: Report())
    status, out, _ = run(capsys, "verify", "ParaM2RNN", "--length", "3")
    assert status == 1
    assert "FAIL" in out


@pytest.mark.parametrize("verdicts", [(True, False), (False, True), (False, False)])
def test_verify_fails_if_any_variant_does(capsys, monkeypatch, verdicts):
    """Not only the last one."""
    import pararnn.layers

    given = iter(verdicts)

    class Report:
        def __init__(self) -> None:
            self.passed = next(given)

    monkeypatch.setattr(pararnn.layers, "verify_agreement", lambda module, x, dt: Report())
    status, _, _ = run(capsys, "verify", "ParaGRU", "--length", "3")
    assert status == 1


def test_files_of_the_current_folder_replace_no_module(tmp_path):
    """It is searched last, and only for what is named as module:name."""
    trap = "import sys; print('trap'); sys.exit(7)\n"
    for name in ("torch", "sympy", "json", "numpy"):
        (tmp_path / f"{name}.py").write_text(trap)
    (tmp_path / "mine.py").write_text(
        "from pararnn import ParaGRU\ndef cell():\n    return ParaGRU(2, 3)\n"
    )
    code = "import sys; from pararnn import cli; sys.exit(cli.main(sys.argv[1:]))"
    for arguments, status in ((("list",), 0), (("verify", "mine:cell", "--length", "4"), 0)):
        command = [sys.executable, "-P", "-c", code, *arguments]
        path = {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=path)
        assert (done.returncode, "trap" in done.stdout) == (status, False), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "ParaLSTM9"), "got name 'ParaLSTM9', expected one of ParaGRU[diag]"),
        (("show", "nowhere:cell"), "nowhere:cell: No module named 'nowhere'; run this where"),
        (("show", "examples.elman:nothing"), "has no 'nothing'"),
        (("show", "torch:nn"), "got module, expected a function"),
        (("show", "os:getcwd"), "os:getcwd: got str, expected a cell"),
        (("verify", "os:getcwd"), "os:getcwd: got str, expected a factory"),
        (("verify", ":x"), "got ':x', expected module:name"),
        (("show", "examples.:x"), "got 'examples.:x', expected module:name"),
        (("verify", "ParaLSTM9"), "for a cell of your own. Did you mean 'ParaLSTM'?"),
        (("show", "mingru[decay"), "Did you mean 'MinGRU[decay]'?"),
        (
            ("show", "DMR"),
            "SelectiveMemory, or module:factory for a cell of your own. Did you mean 'DRM'?",
        ),
        (("show", "selectivememory"), "Did you mean 'SelectiveMemory'?"),
        (("show", "DRMFloww"), "Did you mean 'DRMFlow'?"),
        (("verify", "SelectiveMemory"), "a part of the DRM, expected a cell"),
        (("verify", "ParaGRU[head]", "--width", "7"), "got 2 heads for d_h=7"),
        (("verify", "examples.elman:Elman"), "expected a factory that needs no arguments"),
        (("verify", "examples.elman:elman"), "got Spec, expected a factory"),
        (("verify", "examples.elman:factory", "--width", "7"), "the factory decides"),
        (("verify", "ParaGRU", "--device", "nonsense"), "--device nonsense: "),
    ],
)
def test_problems_are_sentences(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("pararnn: ")
    assert err.rstrip().count("\n") == 0


@pytest.mark.parametrize("arguments", [(), ("lsit",), ("verify", "ParaGRU", "--length", "0")])
def test_wrong_usage_ends_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: pararnn" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("verify", "MinGRU"), ("probe", "parity", "GRU")])
@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--seed", "99999999999999999999999", "an integer from 0 to 4294967295"),
        ("--seed", "-1", "an integer from 0 to 4294967295"),
        ("--seed", "abc", "an integer from 0 to 4294967295"),
        ("--number", "abc", "a positive integer"),
        ("--number", "-2", "a positive integer"),
    ],
)
def test_wrong_numbers(capsys, command, option, value, expected):
    if option == "--number":
        option = "--steps" if command[0] == "probe" else "--length"
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, option, value])
    assert ended.value.code == 2
    assert f"got {value}, expected {expected}" in capsys.readouterr().err


def test_catalog_outside_a_clone(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "site-packages" / "pararnn" / "cli.py"))
    status, _, err = run(capsys, "catalog")
    assert status == 2
    assert "from a clone of the repository, with 'make catalog'" in err


def test_catalog_in_a_clone_builds(capsys, monkeypatch):
    pytest.importorskip("mkdocs")
    calls = []

    def instead(command, cwd):
        calls.append((command[1:], cwd))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", instead)
    status, _, _ = run(capsys, "catalog", "--once", "--port", "0")
    assert status == 0
    assert calls == [([str(ROOT / "tools" / "catalog.py"), "--port", "0", "--once"], ROOT)]


def test_starts_without_the_heavy_imports():
    program = (
        "import sys; from pararnn import cli\n"
        "try: cli.main(['--version'])\n"
        "except SystemExit: pass\n"
        "print(*sorted({'torch', 'sympy', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[0].startswith("pararnn ")
    assert done.stdout.splitlines()[1:] in ([], [""])


def test_the_command_is_installed_and_survives_a_closed_pipe():
    command = f"{Path(sys.executable).parent / 'pararnn'} show ParaGRU | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout == "ParaGRU\n"
    assert done.stderr == ""


def test_probe_lists_tasks_and_models(capsys):
    status, out, _ = run(capsys, "probe")
    assert status == 0
    assert out.startswith("tasks:  parity, S3, ")
    assert "\nmodels: GRU, log, signed, " in out
    assert run(capsys, "probe", "parity")[:2] == (0, out)


def test_probe(capsys, monkeypatch):
    import json

    from pararnn import tasks

    small = tasks.Protocol(steps=9, length=8, batch=4, width=4, every=2, final=(
        tasks.Evaluation(3, 8, 1),))  # fmt: skip
    monkeypatch.setattr(tasks, "WORDS", small)
    arguments = ("probe", "S3", "GRU", "--seed", "0", "4", "--steps", "3", "--layers", "2")
    status, out, err = run(capsys, *arguments, "--json", "--select", "best")
    first, second = map(json.loads, out.splitlines())
    assert status == 0
    assert [r["seed"] for r in (first, second)] == [0, 4]
    assert first["scores"] != second["scores"] or first["checks"] != second["checks"]
    assert (first["n_layers"], first["protocol"]["select"]) == (2, "best")
    assert [c["step"] for c in first["checks"]] == [2, 3]
    assert err.startswith("step 2: loss 1.")
    status, out, _ = run(capsys, *arguments)
    assert out.splitlines()[1].startswith("S3 GRU L=2 seed 4: @8 ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("S4", "GRU"), "task: got 'S4', expected one of parity, S3"),
        (("Parity", "signed"), "Did you mean 'parity'?"),
        (("S3", "signd"), "Did you mean 'signed'?"),
        (("S3", "gru"), "model: got 'gru', expected one of GRU"),
        (("S3", "signed-decay"), "no time gaps"),
        (("S3", "GRU", "--device", "nowhere"), "--device nowhere"),
    ],
)
def test_probe_of_what_there_is_not(capsys, arguments, message):
    status, out, err = run(capsys, "probe", *arguments)
    assert (status, out) == (2, "")
    assert message in err
