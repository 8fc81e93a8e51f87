"""`cpt-fx export`: a model as ONNX, as QDQ, or as a directory that ONNX Runtime trains; also its environment checks."""

from __future__ import annotations

import argparse
import functools
import platform
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpt_fx.cli import common
from cpt_fx.cli.common import Commands, UsageError, build_schedule, command, print_json, print_table
from cpt_fx.cli.models import RECIPE, add_model, load, model_and_inputs
from cpt_fx.errors import ExportError
from cpt_fx.schedules.bits import Bits, as_bits

if TYPE_CHECKING:
    from torch import nn

    from cpt_fx.ort.environment import Finding
    from cpt_fx.ort.manifest import Manifest

MODEL = """The callable takes no arguments and returns (model, example_inputs): inputs are a tuple of the model's
arguments, or a dict of them by name. A model that is not transformed yet is transformed first."""
LOSSES = ("cross_entropy", "mse", "bce_with_logits", "l1", "none")
OPTIMIZERS = ("sgd", "adam", "adamw")
WRITE, RUN, GPU, API = "write ONNX files", "run and train them", "the same on a GPU", "ONNX Runtime's training API"
"""What the doctor checks."""


def add(commands: Commands) -> None:
    """Declare the subcommand and its own subcommands."""
    top = command(commands, "export", run_export)
    targets = top.add_subparsers(title="targets", metavar="TARGET")
    made = _model_command(targets, "onnx", run_onnx, output="FILE")
    three = "one for all, or three: weights, activations, gradients"
    made.add_argument("--bits", type=_bits, metavar="N[,N,N]", help=f"fix widths: {three} (default: they are inputs)")
    made = _model_command(targets, "qdq", run_qdq, output="FILE")
    made.add_argument(
        "--bits", type=_bits, default=8, metavar="N[,N,N]", help=f"widths: {three} (default: %(default)s)"
    )
    made = _model_command(targets, "ort-training", run_training, output="DIRECTORY")
    returned = "(%(default)s); none: the model returns its loss"
    made.add_argument("--loss", choices=LOSSES, default=LOSSES[0], help=returned)
    made.add_argument("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0], help="(default: %(default)s)")
    made.add_argument("--lr", type=float, metavar="RATE", help="learning rate (default: torch's)")
    made.add_argument("--momentum", type=float, metavar="M", help="of sgd (default: none)")
    made.add_argument("--weight-decay", type=float, metavar="W", help="(default: torch's)")
    _model_command(targets, "report", run_report)
    common.add_json(command(targets, "doctor", run_doctor))
    made = command(targets, "inspect", run_inspect)
    made.add_argument("directory", type=Path, metavar="DIRECTORY")
    common.add_json(made)


def _bits(text: str) -> Bits:
    """Read widths, as a type for argparse."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
        return as_bits("bits", numbers[0] if len(numbers) == 1 else numbers)
    except ValueError as error:
        said = str(error) if "bits" in str(error) else f"one whole number or three, as in 4,8,8, got {text!r}"
        raise argparse.ArgumentTypeError(said) from error


_FLAGS = {
    r"\boverwrite=True": "--overwrite",
    r"\bdynamic_batch=False": "--fixed-batch",
    r"^bits\b": "--bits",
    r"\bloss=None": "--loss none",
    r"\bloss='(\w+)'": r"--loss \1",
    r"\bexport\.(onnx|qdq)\b": r"`cpt-fx export \1`",
    r"\bexport\.ort_training\b": "`cpt-fx export ort-training`",
}
"""Pattern of an argument in error messages -> the command line option for it."""


def _with_flags(run: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], None]:
    """Wrap a command so that its errors name command line options instead of arguments."""

    @functools.wraps(run)
    def told(options: argparse.Namespace) -> None:
        try:
            run(options)
        except ExportError as error:
            said = functools.reduce(lambda text, flag: re.sub(flag[0], flag[1], text), _FLAGS.items(), str(error))
            raise ExportError(said) from error

    return told


def _model_command(
    targets: Commands, name: str, run: Callable[[argparse.Namespace], None], output: str = ""
) -> argparse.ArgumentParser:
    made = command(targets, name, _with_flags(run))
    made.description = f"{made.description}\n{MODEL}"
    add_model(made)
    if output:
        made.add_argument("output", type=Path, metavar=output, help="what to write")
        made.add_argument("--overwrite", action="store_true", help="replace what is there")
        made.add_argument("--fixed-batch", action="store_true", help="only for the batch of the example inputs")
    return made


# Exports are imported before the model is built, which may take long: the import fails early if a package is missing.


def run_export(options: argparse.Namespace) -> None:
    """Write a model as ONNX, or for training in ONNX Runtime.

    Write a transformed model for ONNX and ONNX Runtime, say beforehand what is exact, and look at what is
    installed. The packages that this needs are extras: `cpt-fx export doctor` says which are missing.

    example:
      cpt-fx export doctor
    """
    raise UsageError(f"name a target, as in `cpt-fx export doctor`\n{options.parser.format_usage()}")


def run_onnx(options: argparse.Namespace) -> None:
    """One file that any ONNX Runtime runs.

    Write a model as it evaluates, each quantizer as one node. Widths are inputs of the file, or fixed by --bits.

    example:
      cpt-fx export onnx mypackage.models:make model.onnx --bits 8
    """
    from cpt_fx.export import onnx

    result, inputs = _transformed(options)
    onnx(result, inputs, options.output, options.bits, **_common(options))
    _print_file(options)


def run_qdq(options: argparse.Namespace) -> None:
    """One file of standard QuantizeLinear and DequantizeLinear.

    Write a model for deployment, in operators that every backend knows. Prints what differs from the model.

    example:
      cpt-fx export qdq mypackage.models:trained model.onnx --bits 8
    """
    from cpt_fx.export import qdq

    result, inputs = _transformed(options)
    report = qdq(result, inputs, options.output, options.bits, verbose=not options.json, **_common(options))
    _print_file(options, report=asdict(report) | {"path": str(report.path)})


def run_training(options: argparse.Namespace) -> None:
    """A directory that cpt_fx.ort.Trainer trains.

    Write training, evaluation and optimizer graphs, and a checkpoint. Any schedule may drive the training.

    example:
      cpt-fx export ort-training mypackage.models:make directory --loss cross_entropy --optimizer adamw --lr 1e-3
    """
    if options.momentum is not None and options.optimizer != "sgd":
        raise UsageError(f"--momentum is for --optimizer sgd, got {options.optimizer}")
    from cpt_fx.export import ort_training

    result, inputs = _transformed(options)
    loss = None if options.loss == "none" else options.loss
    ort_training(result, inputs, options.output, loss=loss, optimizer=_optimizer(options, result), **_common(options))
    _print_directory(options.output, options.json)


def run_report(options: argparse.Namespace) -> None:
    """What is exact, approximated or refused.

    Say for every target and layer what an export would do, without writing anything.

    example:
      cpt-fx export report mypackage.models:make
    """
    from cpt_fx.export import report

    found = report(*_transformed(options))
    common.answer(options, found.to_dict, found)


def run_doctor(options: argparse.Namespace) -> None:
    """What is installed, what works, what is missing.

    Look at the packages that exports need, and at CUDA, and say how to repair what does not work. The exit code
    is 1 where models cannot be exported for training.

    example:
      cpt-fx export doctor --json
    """
    from cpt_fx.ort import environment

    findings = {
        WRITE: environment.check_onnx("ort"),
        RUN: environment.check_runtime(),
        GPU: environment.check_cuda(),
        API: environment.check_training(),
    }
    names = ("cpt_fx", "torch", "numpy", "onnx", "onnxscript", "onnx-ir")
    packages = {name: version for name in names if (version := environment.version_of(name))}
    python = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    _print_findings(options.json, python, packages, environment.builds(), findings)
    for finding in (findings[WRITE], findings[RUN]):
        if not finding.works:
            raise environment.PackageError(f"models cannot be exported for training here: {finding.problem}")


def run_inspect(options: argparse.Namespace) -> None:
    """What an exported directory holds.

    Show what a directory of `cpt-fx export ort-training` holds, and whether its files are as they were written.

    example:
      cpt-fx export inspect directory
    """
    _print_directory(options.directory, options.json)


def _transformed(options: argparse.Namespace) -> tuple[nn.Module, Any]:
    """Return the transformed model that a reference names, and its example inputs."""
    schedule = build_schedule(options.schedule, options)
    model, arguments, named = model_and_inputs(options.model, load(options.model))
    inputs = arguments or named
    if not inputs:
        raise ValueError(f"{options.model} must return (model, example_inputs): an export runs the model on them")
    from cpt_fx.api import history_of, transform
    from cpt_fx.errors import TransformError

    try:
        history_of(model)
    except TransformError:
        result = transform(
            model, schedule, recipe=options.recipe, exclude=options.exclude,
            example_inputs=arguments, example_kwargs=named,
        )  # fmt: skip
        return result, inputs
    if options.exclude or options.recipe != RECIPE:
        raise UsageError(f"{options.model} returns a model that is transformed: --recipe and --exclude come too late")
    return model, inputs


def _common(options: argparse.Namespace) -> dict[str, bool]:
    return {"dynamic_batch": not options.fixed_batch, "overwrite": options.overwrite}


def _optimizer(options: argparse.Namespace, result: nn.Module) -> Any:
    """Return an optimizer with the given settings, and torch's defaults for the others."""
    settings = {"lr": options.lr, "momentum": options.momentum, "weight_decay": options.weight_decay}
    given = {name: value for name, value in settings.items() if value is not None}
    if not given:
        return options.optimizer
    import torch

    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    with common.told_as_usage():
        return kinds[options.optimizer](result.parameters(), **given)


def _print_file(options: argparse.Namespace, **more: Any) -> None:
    size = options.output.stat().st_size
    if options.json:
        print_json({"path": str(options.output), "bytes": size, **more})
    else:
        print(f"wrote {options.output}, {_size(size)}")


def _print_findings(
    as_json: bool, python: str, packages: dict[str, str], builds: dict[str, str], findings: dict[str, Finding]
) -> None:
    """Print what is installed and what works; only one of `builds` should provide the folder `onnxruntime`."""
    from rich.text import Text

    mixed = f"{' and '.join(builds)} share one folder, and uninstalling either breaks the other: "
    remark = f"{mixed}uninstall all, install one" if len(builds) > 1 else ""  # a warning, even if one of them works
    if as_json:
        told = {aim: {"works": finding.works} | asdict(finding) for aim, finding in findings.items()}
        print_json({"python": python, "packages": packages, "builds": builds, "findings": told, "remark": remark})
        return
    print(f"Python {python}: {', '.join(f'{name} {version}' for name, version in (packages | builds).items())}")
    words = {True: Text("yes", "green"), False: Text("no", "bold red")}
    rows = [(aim, words[finding.works], finding.found or "–") for aim, finding in findings.items()]
    print_table(("to", "works", "with"), rows, words=3)
    problems = dict.fromkeys(finding.message for finding in findings.values() if not finding.works)
    print(*problems, *filter(None, [remark]), sep="\n")


def _print_directory(directory: Path, as_json: bool) -> None:
    from cpt_fx.ort.manifest import read

    manifest = read(directory)
    files = _files(directory, manifest)
    if as_json:
        print_json({"directory": str(directory), "manifest": asdict(manifest), "files": files})
        return
    trained = sum(parameter.trainable for parameter in manifest.parameters)
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    made = manifest.optimizer
    groups = [{"lr": f"{rate:g}"} | own for rate, own in zip(made.learning_rates, made.settings, strict=True)]
    listed = "; ".join(", ".join(f"{key} {value}" for key, value in group.items()) for group in groups)
    print(f"{directory}, written with {versions}")
    print(f"schedule: {manifest.schedule}; any other may drive the training")
    print(f"loss: {manifest.loss}; optimizer: {made.name}, {listed}")
    print(
        f"parameters: {len(manifest.parameters)}, trained: {trained}; state: {len(manifest.states)}; random draws in a "
        f"step: {manifest.seeds}"
    )
    rows = [
        (kind, tensor.name, tensor.dtype, " x ".join(map(str, tensor.shape)) or "–")
        for kind, tensors in (("input", manifest.inputs), ("target", manifest.targets), ("output", manifest.outputs))
        for tensor in tensors
    ]
    rows += [("width", name, "int64", "–") for name in manifest.width_sources]
    print_table(("", "name", "type", "shape"), rows, words=4)
    print_table(
        ("file", "state", "size"), [(name, one["state"], _size(one["bytes"])) for name, one in files.items()], 2
    )


def _files(directory: Path, manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Compare every file with its digest in the manifest."""
    from cpt_fx.common.files import digest as digest_of

    found: dict[str, dict[str, Any]] = {}
    for name, digest in manifest.digests.items():
        path, state = directory / name, "missing"
        if there := path.is_file():
            state = "as written" if digest_of(path) == digest else "changed"
        found[name] = {"state": state, "bytes": path.stat().st_size if there else 0}
    return found


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"
