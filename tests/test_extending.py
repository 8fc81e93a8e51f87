"""What it takes to add a number format, a pass or an export target: each is added to a copy of the package, and works.

The number of files that each changes is part of the test; `docs/operators.md` adds an operator by one call.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# File -> what is put after pieces of its text (after "": at its end), or the text of a new file.
Edits = dict[str, dict[str, str] | str]

FORMAT: Edits = {
    "cpt_fx/formats.py": {
        '    SYMMETRIC = "symmetric"\n': '    SHIFT = "shift"\n    """Symmetric, in steps that are powers of two."""\n',
    },
    "cpt_fx/quantizers/numerics.py": {
        "": """

def _shift(x: Tensor, bits: Tensor, grid: Grid, values: ValueRange) -> Tensor:
    reach = levels_of(bits, x.dtype).div(2).floor().clamp_min(1)
    scale = _once(2 * floor_to_power_of_two(divisor(amplitude(values) / reach)))
    return _round_(x / scale, grid.rounding, _once(-reach), _once(reach)).mul_(scale)


_UNIFORM[Scheme.SHIFT] = _shift
""",
    },
}
USE_FORMAT = """
import torch, cpt_fx
from cpt_fx.functional import fake_quantize
from cpt_fx.recipes import Recipe, Rule
from cpt_fx.formats import Format, Rounding

torch.manual_seed(0)
x = torch.randn(64, 16)
for bits in (1, 2, 5, 8):
    y = fake_quantize(x, bits, scheme="shift")
    compiled = torch.compile(lambda x, b: fake_quantize(x, b, scheme="shift"), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, torch.tensor(bits)), y) and y.unique().numel() <= 2**bits + 1, bits
    step = y.unique().diff().min()
    assert torch.frexp(step).mantissa == 0.5, bits  # a power of two
assert torch.equal(fake_quantize(x, 32, scheme="shift"), x)

whole = Format(scheme="shift", block=0)
rule = Rule(input=whole, weight=whole, gradient=Format(scheme="shift", rounding="stochastic"))
schedule = cpt_fx.schedules.named("CR", q_min=3, q_max=8, total_steps=8)
for capture in ("symbolic", "dynamo"):
    torch.manual_seed(0)
    model = cpt_fx.transform(
        torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)), schedule,
        recipe=Recipe(name="shift", linear=rule), example_inputs=(x,), capture=capture,
    )
    model(x).square().mean().backward()
    inspection = cpt_fx.inspect(model)
    assert len(inspection.quantizers) == 6 and inspection.verify(x).proven, str(inspection.verify(x))
    assert {view.format.scheme.value for view in inspection.quantizers} == {"shift"}
    schedule.step()
integer = cpt_fx.transform(torch.nn.Linear(16, 8), schedule, recipe=Recipe(name="shift", linear=rule),
                           execution="integer", example_inputs=(x,))
(product,) = cpt_fx.inspect(integer).products
assert "has no integer codes" in str(product), product
"""
EXPORT_FORMAT = """
import numpy as np, onnxruntime

path = cpt_fx.export.onnx(model, (x,), "model.onnx", 3)
session = onnxruntime.InferenceSession(path)
(ours,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
model.eval()
with torch.no_grad(), cpt_fx.at_bits(model, 3):
    assert np.allclose(ours, model(x).numpy(), atol=1e-5)
made = cpt_fx.export.qdq(model, (x,), "qdq.onnx", 8)
assert any("the scheme shift" in item.note for item in made.quantizers), made
cpt_fx.export.ort_training(model, (x,), "training", loss="mse", optimizer="sgd")
"""

PASS: Edits = {
    "passes/freeze.py": '''"""Fix the widths of some layers."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from cpt_fx.ir.meta import DECISION
from cpt_fx.ir.pass_base import Pass, Report


@dataclass(frozen=True)
class Freeze(Pass):
    """Fix all layers at a width."""

    bits: int = 6

    name: ClassVar[str] = "freeze"
    requires: ClassVar[str] = "annotated"

    def run(self, module: fx.GraphModule) -> Report:
        nodes = [node for node in module.graph.nodes if DECISION in node.meta]
        for node in nodes:
            decision = node.meta[DECISION]
            sources = tuple((role, replace(source, fixed=self.bits)) for role, source in decision.width_sources)
            node.meta[DECISION] = replace(decision, width_sources=sources)
        return Report(self.name, len(nodes), ())
''',
    "passes/__init__.py": {
        "from cpt_fx.passes.decompose import Decompose\n": "from cpt_fx.passes.freeze import Freeze\n",
    },
    "cpt_fx/pipeline.py": {
        "from cpt_fx.passes.decompose import Decompose\n": "from cpt_fx.passes.freeze import Freeze\n",
        "(Normalize(), Decompose(), Annotate(), ": "Freeze(), ",
    },
}
USE_PASS = """
import torch, cpt_fx
from cpt_fx.passes import Freeze

x = torch.randn(4, 16)
model = cpt_fx.transform(torch.nn.Linear(16, 8), cpt_fx.schedules.Static(4), example_inputs=(x,))
inspection = cpt_fx.inspect(model)
assert [report.name for report in inspection.passes][3] == "freeze"
assert {view.bits for view in inspection.quantizers} == {6} and inspection.verify(x).proven
"""

TARGET: Edits = {
    "cpt_fx/export/printing.py": '''"""`export.text`: the rewritten graphs as text."""

from pathlib import Path

from cpt_fx.api import graphs


def text(result, example_inputs, path):
    Path(path).write_text("\\n".join(str(graph.graph) for graph in graphs(result)))
    return Path(path)


def attempt(attempts, folder):
    made = text(attempts.result, attempts.example_inputs, folder / "made.txt").read_text()
    for row, view in zip(attempts.rows, attempts.views, strict=True):
        if view.node in made:
            row.verdicts["text"] = "exact"
    return ("tried: the graphs were printed",)
''',
    "cpt_fx/export/__init__.py": {"TARGETS = {\n": '    "text": "cpt_fx.export.printing",\n'},
    "cpt_fx/cli/export.py": {
        '    targets = top.add_subparsers(title="targets", metavar="TARGET")\n': (
            '    _model_command(targets, "text", run_text, output="FILE")\n'
        ),
        "": '''

def run_text(options: argparse.Namespace) -> None:
    """The rewritten graphs as text.

    Write the rewritten graphs as text.
    """
    from cpt_fx.export import text

    result, inputs = _transformed(options)
    text(result, inputs, options.output)
    _print_file(options)
''',
    },
}
USE_TARGET = """
import torch, cpt_fx
from cpt_fx.cli import main

x = torch.randn(4, 16)
model = cpt_fx.transform(torch.nn.Linear(16, 8), cpt_fx.schedules.Static(4), example_inputs=(x,))
report = cpt_fx.export.report(model, (x,))
assert report.status("text") == "exact" and len(report.targets) == 4, report
assert cpt_fx.export.text(model, (x,), "text.txt").stat().st_size > 0
assert main(["export", "text", "made:model", "by_command.txt"]) in (0, None)
open("by_command.txt").read().index("fake_quantize")
"""


def run_extended(folder: Path, edits: Edits, code: str) -> None:
    """Copy the package, edit the copy, and run a program with it."""
    for name in ("cpt_fx", "passes"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name, edit in edits.items():
        path = folder / name
        if isinstance(edit, str):
            assert not path.exists(), name
            path.write_text(edit)
            continue
        text = path.read_text()
        for place, more in edit.items():
            assert not place or text.count(place) == 1, f"{name} has {text.count(place)} times {place!r}"
            text = text.replace(place, place + more) if place else text + more
        path.write_text(text)
    (folder / "made.py").write_text(
        "import torch\ndef model():\n    return torch.nn.Linear(16, 8), (torch.ones(2, 16),)\n"
    )
    (folder / "program.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


needs_runtime = pytest.mark.skipif(not find_spec("onnxscript") or not find_spec("onnxruntime"), reason="needs onnx")


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", pytest.param(EXPORT_FORMAT, marks=needs_runtime)], ids=["runs", "exports"])
def test_a_format_is_two_files(more: str, tmp_path: Path) -> None:
    """Its name, and its arithmetic: eager, compiled, captured, proven, refused with a reason on integers, exported."""
    assert len(FORMAT) == 2
    run_extended(tmp_path, FORMAT, USE_FORMAT + more)


def test_a_pass_is_three_files(tmp_path: Path) -> None:
    assert len(PASS) == 3
    run_extended(tmp_path, PASS, USE_PASS)


@needs_runtime
def test_an_export_target_is_three_files(tmp_path: Path) -> None:
    assert len(TARGET) == 3
    run_extended(tmp_path, TARGET, USE_TARGET)
