"""The command: what it prints, what it refuses, and that planning does not wait for torch."""

import subprocess
import sys
from pathlib import Path

import pytest

import cpt_fx
from cpt_fx.cli import parser
from cpt_fx.schedules import NAMES, named, relative_cost
from tests.cli import commands
from tests.cli.commands import Capture, call, data

ROOT = Path(__file__).parents[2]
COMMANDS = ("demo", "schedules", "plot", "cost", "inspect", "range-test", "export", "study")

MODELS = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

def with_inputs():
    return make(), (torch.randn(16, 4),)

def unfit_input():
    return make(), torch.randn(16, 5)

def bare_input():
    return make(), torch.randn(16, 4)

def named_input():
    return make(), {"input": torch.randn(16, 4)}

def to_train():
    torch.manual_seed(0)
    labels = torch.arange(30) % 3
    return make(), [(torch.randn(3, 4)[labels] + 0.1 * torch.randn(30, 4), labels) for _ in range(1)]

def to_train_with_loss():
    return *to_train(), lambda model, batch: (model(batch[0]) ** 2).mean()

def fails():
    raise KeyError("no data")

def fails_at_length():
    raise ValueError("two problems:\\n  one\\nanother")

def number():
    return 3

def needs(argument):
    return argument

class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

ready = make()
nothing = nn.ReLU()
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cli_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "cli_models", raising=False)
    return tmp_path


def refused(capsys: Capture, *arguments: str) -> tuple[int, str]:
    """Returns the exit code and the one line that says why."""
    code, said = commands.refused(capsys, *arguments)
    return code, said.splitlines()[-1]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: Capture) -> None:
    code, out, _ = call(capsys, name, "--help")
    assert code == 0
    # The example is one that the command accepts.
    example = out.rpartition("example:\n")[2].split()
    assert example[:2] == ["cpt-fx", name]
    assert callable(parser().parse_args(example[1:]).run)


def test_the_command_lists_its_parts_and_its_version(capsys: Capture) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert all(f"\n    {name}" in out for name in COMMANDS)
    assert call(capsys, "--version") == (0, f"cpt-fx {cpt_fx.__version__}\n", "")


def test_without_a_command_it_shows_help_and_fails(capsys: Capture) -> None:
    code, out, err = call(capsys)
    assert (code, out) == (2, "")
    assert "commands:" in err


@pytest.mark.parametrize(
    "arguments", [["--help"], ["schedules"], ["cost"], ["cost", "CR", "--json"], ["demo", "--help"]]
)
def test_planning_does_not_import_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom cpt_fx.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_schedules_are_the_ten(capsys: Capture) -> None:
    rows = data(capsys, "schedules")["schedules"]
    assert [row["name"] for row in rows] == list(NAMES)
    by_name = {row["name"]: row for row in rows}
    assert by_name["RTV"]["profile"] == "rex"
    assert by_name["RTV"]["pattern"] == "triangular"
    assert by_name["RTV"]["reflection"] == "vertical"
    assert by_name["RR"]["savings_group"] == "large"
    assert by_name["RR"]["relative_cost"] == pytest.approx(0.399, abs=5e-4)
    code, out, _ = call(capsys, "schedules", "--q-min", "5", "--q-max", "6")
    assert code == 0
    assert next(line for line in out.splitlines() if line.strip().startswith("ER")).split()[-1] == "0.963"


def test_cost_is_that_of_the_library(capsys: Capture) -> None:
    options = ["--q-min", "4", "--q-max", "6", "--steps", "1000", "--cycles", "4", "--q-grad", "8"]
    found = data(capsys, "cost", "ct", "RR", *options)
    expected = relative_cost(named("CT", q_min=4, q_max=6, total_steps=1000, cycles=4, q_grad=8))
    assert [row["name"] for row in found["costs"]] == ["CT", "RR"]
    assert found["costs"][0]["relative"] == expected
    assert found["costs"][0]["saving"] == 1 - expected
    assert found["schedule"] == {"q_min": 4, "q_max": 6, "q_grad": 8, "total_steps": 1000, "cycles": 4}
    assert len(data(capsys, "cost")["costs"]) == 10
    code, out, _ = call(capsys, "cost", "CR")
    assert code == 0
    assert next(line for line in out.splitlines() if line.strip().startswith("CR")).split()[-3:] == [
        "0.633",
        "36.7",
        "%",
    ]


@pytest.mark.slow
def test_plot_writes_pictures(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    assert call(capsys, "plot", "CR", "--steps", "200")[:2] == (0, "wrote CR.png\n")
    assert (tmp_path / "CR.png").read_bytes().startswith(b"\x89PNG")
    assert call(capsys, "plot", "--steps", "200", "--output", "all.svg")[0] == 0
    assert (tmp_path / "all.svg").read_text().lstrip().startswith("<?xml")
    assert "Format 'doc' is not supported" in refused(capsys, "plot", "CR", "--output", "x.doc")[1]


def test_plot_without_matplotlib_names_the_extra(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert refused(capsys, "plot", "CR") == (1, 'cpt-fx: error: plotting needs matplotlib: pip install "cpt_fx[viz]"')


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["schedule"], "invalid choice: 'schedule'"),
        (["cost", "RTX"], "got 'RTX'. Did you mean \"RT"),
        (["cost", "--q-min", "9"], "q_min must not exceed q_max, got q_min=9 and q_max=8"),
        (["cost", "--q-min", "0"], "q_min must be an integer from 1 to 32, got 0"),
        (["cost", "--steps", "4"], "cycles must not exceed total_steps"),
        (["cost", "--q-min", "three"], "invalid int value: 'three'"),
        (["demo", "--schedule", "static"], "got 'static'"),
        (["inspect"], "required: REFERENCE"),
        (
            ["inspect", "cli_models"],
            "a reference looks like file.py:callable or package",
        ),
        (["range-test", "cli_models:to_train", "--widths", "8", "2"], "lowest width first, got 8 2"),
        (["range-test", "cli_models:to_train", "--threshold", "90"], "at most 1, got 90.0"),
        (
            ["range-test", "cli_models:to_train", "--steps", "2"],
            "steps_per_width must be an integer of at least 4, got 2",
        ),
        (["range-test", "cli_models:to_train", "--gradient", "40"], "gradient must be an integer from 1 to 32, got 40"),
        (["demo", "--steps", "3"], "steps must be an integer of at least 8, got 3"),
    ],
)
def test_wrong_usage_is_code_2(arguments: list[str], message: str, capsys: Capture, models: Path) -> None:
    code, line = refused(capsys, *arguments)
    assert code == 2
    assert message in line


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("no_such_module:make", "there is no module no_such_module"),
        ("cli_models.deeper:make", "there is no module cli_models.deeper"),
        ("no_such_file.py:make", "there is no file"),
        ("cli_models:mak", "cli_models has no 'mak'. Did you mean \"make\"?"),
        ("cli_models:fails", "cli_models:fails raised KeyError: 'no data'"),
        ("cli_models:needs", "raised TypeError: needs() missing 1 required positional argument"),
        ("cli_models:number", "must return a model or (model, example_inputs), got int"),
        ("cli_models:to_train", "must return example_inputs as a tuple, got list"),
        ("cli_models:unfit_input", "RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x5 and 4x8)"),
        ("cli_models:nothing", "there is nothing to quantize in ReLU"),
    ],
)
def test_what_fails_says_why_in_a_line(reference: str, message: str, capsys: Capture, models: Path) -> None:
    code, line = refused(capsys, "inspect", reference)
    assert code == 1
    assert message in line


def test_what_is_said_in_lines_stays_in_lines(capsys: Capture, models: Path) -> None:
    code, out, err = call(capsys, "inspect", "cli_models:fails_at_length")
    expected = "cpt-fx: error: cli_models:fails_at_length raised ValueError: two problems:\n  one\n  another\n"
    assert (code, out, err) == (1, "", expected)


def test_a_traceback_is_shown_on_request(capsys: Capture, models: Path) -> None:
    code, _, err = call(capsys, "--traceback", "inspect", "cli_models:fails")
    assert code == 1
    assert "Traceback" in err
    assert "no data" in err


def test_inspect_shows_the_quantizers(capsys: Capture, models: Path) -> None:
    found = data(capsys, "inspect", "cli_models:make", "--q-min", "4", "--exclude", "2")
    assert {row["layer"] for row in found["quantizers"]} == {"0"}
    assert {row["role"] for row in found["quantizers"]} == {"weight", "activation", "bias", "gradient"}
    assert {row["bits"] for row in found["quantizers"] if row["role"] == "weight"} == {4}
    assert found["proof"] is None
    assert len(found["uncovered"]) == 1
    code, out, _ = call(capsys, "inspect", "cli_models:Net", "--recipe", "paper")
    assert code == 0
    assert "Net, captured by symbolic" in out


@pytest.mark.parametrize("reference", ["cli_models:with_inputs", "cli_models:bare_input", "cli_models:named_input"])
def test_inspect_proves_with_inputs(reference: str, capsys: Capture, models: Path) -> None:
    code, out, _ = call(capsys, "inspect", reference, "--html", "a.html", "--svg", "a.svg")
    assert code == 0
    assert "\nproven, by a dry run: 8 quantizers ran, 8 times in total; " in out
    # Table, page and data show the run that the proof is about, at the widths the model has.
    assert "never" not in out.partition("\nproven")[0]
    assert "bits now: weight 3, activation 3, bias 3, gradient 8" in out
    page = (models / "a.html").read_text()
    assert "<html" in page
    assert "<b>0</b><span>never ran</span>" in page
    found = data(capsys, "inspect", reference)
    proof = found["proof"]
    assert (proof["proven"], proof["quantizers"], proof["widths"]) == (True, 8, [2])
    assert proof["runs"] == sum(row["times_run"] for row in found["quantizers"]) == 8
    assert all(set(row["levels"]) == {"2"} for row in found["quantizers"])
    assert (models / "a.svg").read_text().lstrip().startswith("<svg")


def test_a_model_is_taken_as_it_is(capsys: Capture, models: Path) -> None:
    for reference in ("cli_models:ready", "cli_models.py:make"):
        assert len(data(capsys, "inspect", reference)["quantizers"]) == 8


def test_range_test_prints_what_it_measured(capsys: Capture, models: Path) -> None:
    arguments = ["range-test", "cli_models:to_train", "--steps", "12", "--widths", "2", "4", "--threshold", "0.05"]
    found = data(capsys, *arguments)
    assert found["widths"] == [2, 3, 4]
    assert [len(losses) for losses in found["losses"]] == [12, 12, 12]
    assert found["q_min"] in (2, 3, 4)
    code, out, err = call(capsys, "range-test", "cli_models:to_train_with_loss", *arguments[2:])
    assert code == 0
    assert "q_min = " in out
    assert "range test" in err
    code, line = refused(capsys, "range-test", "cli_models:make")
    assert code == 1
    assert "must return (model, data) or (model, data, loss), got Sequential" in line


@pytest.mark.slow
def test_the_demo_writes_a_report_and_prints_its_numbers(capsys: Capture, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    folder = tmp_path / "report"
    code, out, _ = call(capsys, "demo", "--fast", "--steps", "16", "--schedule", "rr", "--output", str(folder))
    assert code == 0
    assert "proven for RR, with evaluations among the runs: 29 quantizers ran" in out
    assert f"report: {folder / 'index.html'}" in out.replace("\n", "")
    assert "test accuracy" in (folder / "index.html").read_text()
    found = data(capsys, "demo", "--steps", "8", "--output", str(folder), "--seed", "2")
    assert [one["name"] for one in found["runs"]] == ["CR", "static 8"]
    assert [len(one["losses"]) for one in found["runs"]] == [8, 8]
    assert found["runs"][1]["saving"] == 0
    assert (found["proof"]["proven"], found["proof"]["quantizers"]) == (True, 29)
    (tmp_path / "file").write_text("")
    assert refused(capsys, "demo", "--output", str(tmp_path / "file"))[0] == 2


@pytest.mark.filterwarnings("default")
def test_warnings_are_sentences(capsys: Capture) -> None:
    code, _, err = call(capsys, "cost", "CT", "--cycles", "3")
    assert code == 0
    assert err.startswith("cpt-fx: warning: this triangular schedule ends at low precision")
    assert ".py" not in err


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m cpt_fx cost --json | head -n 1"
    run = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("{\n", "")
