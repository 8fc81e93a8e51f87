"""Whole models in ONNX Runtime: three training steps beside the plain model's, and the graphs for inference.

    python -m tests.export.zoo --record benchmarks/results

Each model runs in a process of its own. Training at 32 bits is compared with the model that the user had, under torch's
own optimizer; the inference graphs are compared with the transformed model, at 32 and at 4 bits.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import cpt_fx
from cpt_fx.capture.dry_run import tensors_in
from cpt_fx.errors import ExportError, TransformError
from tests.export.idioms import IDIOMS
from tests.zoo import ANY_MODEL, ZOO
from tests.zoo.layers import Built

TRAINED, CLOSE, LOW_BITS, FLIPPED = 1e-3, 1e-4, 4, 0.05
"""Largest differences relative to the largest element: of what training changed, after three steps, and of outputs. At
low bits a value on the edge of two levels may go to either: at most a twentieth of what quantizing changes, or one row
of an output that has fewer than twenty and ten or more."""
DECIDED = 4.0
"""How far off a trained parameter may be, as a multiple of what the last bits of the model's own parameters make of it
in PyTorch. The layer scales of convnext are decided to 0.6 % after three steps."""

FAMILIES = ("torch.nn recurrent", "torch.nn attention", "torch.nn others", "PyTorch Geometric")
CHOSEN = (
    "bert",
    "distilbert",
    "roberta",
    "electra",
    "albert",
    "gpt2",
    "gptneox",
    "llama",
    "mistral",
    "qwen2",
    "bloom",
    "t5",
    "bart_layer_drop",
    "marian",
    "vit",
    "deit",
    "convnext",
    "segformer",
    "resnet",
    "clip",
    "wav2vec2",
    "whisper",
)  # fmt: skip
"""Of transformers: one of each kind."""
RECORDED = "export_zoo.json"


@dataclass
class Verdict:
    """What became of a model: right, refused, wrong or broken."""

    model: str
    verdict: str
    remark: str = ""
    differences: dict[str, float] | None = None
    seconds: float = 0.0


def models() -> dict[str, Callable[[], Built]]:
    """Return the builders of all models by name."""
    found: dict[str, Callable[[], Built]] = {**ZOO, **IDIOMS}
    for name, entry in ANY_MODEL.items():
        if entry.family in FAMILIES or name in CHOSEN:
            found[f"{entry.needs or 'torch'}: {name}"] = partial(entry.build, 4)
    return found


SHORT = (
    "residual_net", "unet", "conv_grouped", "conv_transpose2d", "two_tensors_one_module", "tied_weights", "norms",
    "dropouts", "frozen", "dict_output", "torch: lstm_bidirectional", "torch: sdpa_masks", "torch: attention_padded",
    "transformers: bert", "torch_geometric: gcn", "two_names", "checkpointed", "forward_hooks", "embeddings",
    "spatial_transformer",
)  # fmt: skip
"""Some for every run of the tests."""


def verdict_of(name: str) -> Verdict:
    """Export a model in all forms, run them, and compare."""
    start = time.monotonic()
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for what, difference, limit in differences(*models()[name](), Path(folder)):
                found[what] = difference
                if not difference <= limit:
                    return Verdict(name, "wrong", f"{what}: {difference:.1e}", found, time.monotonic() - start)
        return Verdict(name, "right", "", found, time.monotonic() - start)
    except (ExportError, TransformError) as error:
        return Verdict(name, "refused", str(error).splitlines()[0], found, time.monotonic() - start)
    except Exception as error:
        remark = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        return Verdict(name, "broken", remark, found, time.monotonic() - start)


def loss_of(output: Any, *unused: Tensor) -> Tensor:
    """Return a loss of any output: each element with a weight of its own, so that no gradient is zero by symmetry."""
    leaves = [leaf for leaf in tensors_in(output) if leaf.is_floating_point()]
    weights = (torch.cos(torch.arange(leaf.numel(), dtype=leaf.dtype)).view_as(leaf) for leaf in leaves)
    return torch.stack([(leaf * weight).mean() for leaf, weight in zip(leaves, weights, strict=True)]).sum()


def differences(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], folder: Path
) -> Iterator[tuple[str, float, float]]:
    """Give what was compared, how large the difference is, and how large it may be."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0  # the plain model draws from torch's generator: tests/export/test_parity.py has dropout
    config: Any = getattr(model, "config", None)
    if config is not None:
        config.use_cache = False  # of transformers: a graph returns no cache
    args, kwargs = pytree.tree_map_only(Tensor, Tensor.contiguous, (args, kwargs))
    plain = copy.deepcopy(model).train()
    schedule = cpt_fx.schedules.Static(8)
    result = cpt_fx.transform(model, schedule, example_inputs=args, example_kwargs=kwargs, prove=False).train()
    if kwargs:  # the exports take arguments either by place or by name
        kwargs = {**inspect.signature(model.forward).bind_partial(*args).arguments, **kwargs}
        args = ()
    yield from _training(plain, result, args, kwargs, folder / "training")
    result.eval()
    yield from _inference(result, args, kwargs, kwargs or args, folder / "model.onnx")


def _training(
    plain: nn.Module, result: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], folder: Path
) -> Iterator[tuple[str, float, float]]:
    if not any(parameter.requires_grad for parameter in plain.parameters()):
        return
    made = torch.optim.SGD([p for p in result.parameters() if p.requires_grad], 0.05, momentum=0.9)
    cpt_fx.export.ort_training(result, kwargs or args, folder, loss=_no_targets, optimizer=made, example_targets=())
    if _draws(plain, args, kwargs):
        return  # from torch's generator: only the export's own verification can draw the same
    trainer = cpt_fx.ort.Trainer(folder, cpt_fx.schedules.Static(32), seed=0, threads=1)
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    losses, state = _steps(plain, args, kwargs)
    for step, loss in enumerate(losses):
        yield f"loss {step}", abs(trainer.step(*leaves) - loss) / max(abs(loss), 0.1), TRAINED
    found = trainer.state_dict()
    differences = {
        name: _difference(found[name].numpy(), value.numpy())
        for name, value in state.items()
        if name in found and value.is_floating_point()
    }
    own = {}
    if max(differences.values(), default=0.0) > TRAINED:
        again = [_steps(plain, args, kwargs, nudged=seed)[1] for seed in range(4)]
        own = {name: max(_difference(one[name].numpy(), state[name].numpy()) for one in again) for name in differences}
    for name, difference in differences.items():
        yield name, difference, max(TRAINED, DECIDED * own.get(name, 0.0))


def _steps(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, nudged: int | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """Train a copy for three steps; where `nudged`, from parameters that are off by the last bit of float32."""
    model = copy.deepcopy(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    if nudged is not None:
        noise = torch.Generator().manual_seed(nudged)
        with torch.no_grad():
            for parameter in trained:
                parameter.mul_(1 + torch.finfo(torch.float32).eps * torch.randn(parameter.shape, generator=noise))
    optimizer = torch.optim.SGD(trained, 0.05, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def _draws(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    losses = []
    for seed in range(2):
        torch.manual_seed(seed)
        losses.append(loss_of(copy.deepcopy(model)(*args, **kwargs)).item())
    return losses[0] != losses[1]


def _no_targets(output: Any) -> Tensor:
    return loss_of(output)


def _inference(
    result: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any, path: Path
) -> Iterator[tuple[str, float, float]]:
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    # Ranges that other widths have made: those of the examples themselves put sums exactly between two levels.
    result.train()(*args, **kwargs)
    result.eval()
    exact = _outputs(result, args, kwargs, 32)
    low = _outputs(result, args, kwargs, LOW_BITS)
    cpt_fx.export.onnx(result, given, path)
    for bits, expected in ((32, exact), (LOW_BITS, low)):
        found = _run(path, leaves, bits)
        for index, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
            if bits == 32 or ours.dtype.kind != "f":
                yield f"onnx at {bits}: output {index}", _difference(theirs, ours), CLOSE
            else:
                moved = max(float(np.abs(ours - exact[index]).mean()), 1e-4 * float(np.abs(ours).max(initial=0.0)))
                difference = float(np.abs(theirs - ours).mean()) / max(moved, 1e-9)
                yield f"onnx at {bits}: output {index}", difference, _flipped(ours)
    report = cpt_fx.export.qdq(result, given, path, bits=8, overwrite=True, verbose=False)
    if report.exact:
        eight = _outputs(result, args, kwargs, 8)
        exact = _outputs(result, args, kwargs, 32)
        for index, (ours, theirs) in enumerate(zip(eight, _run(path, leaves, 8), strict=True)):
            if ours.dtype.kind == "f":
                moved = max(float(np.abs(ours - exact[index]).mean()), 1e-4 * float(np.abs(ours).max(initial=0.0)))
                yield f"qdq: output {index}", float(np.abs(theirs - ours).mean()) / max(moved, 1e-9), _flipped(ours)


def _flipped(output: Any) -> float:
    rows = output.size // output.shape[-1] if output.ndim and output.size else 0
    return max(FLIPPED, 1 / rows) if rows >= 10 else FLIPPED


def _outputs(result: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], bits: int) -> list[Any]:
    # Of a copy: some models write to their buffers in evaluation, too.
    with cpt_fx.at_bits(own := copy.deepcopy(result), bits), torch.no_grad():
        output = own(*args, **kwargs)
    return [leaf.numpy().copy() for leaf in tensors_in(output)]


def _run(path: Path, leaves: Sequence[Tensor], bits: int) -> list[Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    widths = {name: np.array(bits) for name in names if "bits." in name}
    given = [name for name in names if name not in widths]
    return list(session.run(None, widths | dict(zip(given, (leaf.numpy() for leaf in leaves), strict=True))))


def _difference(found: Any, expected: Any) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if found.dtype.kind != "f":
        return float((found != expected).any())
    if not expected.size:
        return 0.0
    return float(np.abs(found - expected).max() / max(float(np.abs(expected).max()), 1e-2))


def run(names: Sequence[str], jobs: int, seconds: float = 600.0) -> Iterator[Verdict]:
    """Try models, each in a process of its own, which may crash."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.export.warm"])
    waiting = list(names)
    running: dict[str, tuple[Any, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            here, there = context.Pipe(duplex=False)
            child = context.Process(target=_in_child, args=(name, there))
            child.start()
            there.close()
            running[name] = (child, here, time.monotonic())
        for name, (child, here, start) in list(running.items()):
            if child.is_alive() and not here.poll(0.2):
                if time.monotonic() - start < seconds:
                    continue
                child.kill()
            try:
                verdict = Verdict(**json.loads(here.recv()))
            except EOFError:
                child.join()
                verdict = Verdict(name, "broken", f"the process ended with {child.exitcode}")
            child.join()
            del running[name]
            yield verdict


def _in_child(name: str, there: Any) -> None:
    there.send(json.dumps(asdict(verdict_of(name))))


def main() -> int:
    """Try all models and say what became of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.export.zoo", description=__doc__)
    parser.add_argument("names", nargs="*", help="models to try; all of them otherwise")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    parser.add_argument("--record", type=Path, help=f"the folder to write {RECORDED} into")
    options = parser.parse_args()
    missing = {name.split(":")[0] for name in models() if ":" in name and find_spec(name.split(":")[0]) is None}
    names = [name for name in options.names or models() if name.split(":")[0] not in missing]
    made = []
    for verdict in run(names, options.jobs):
        print(f"{verdict.verdict:8} {verdict.model} ({verdict.seconds:.0f} s) {verdict.remark}", flush=True)
        made.append(verdict)
    counts = Counter(verdict.verdict for verdict in made)
    runtime = _runtime()
    print(f"{len(made)} models in {runtime}: " + ", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    print(f"not installed: {', '.join(sorted(missing)) or 'nothing'}")
    if options.record:
        page = options.record / RECORDED
        known = json.loads(page.read_text()) if page.exists() else {}
        # A run of some models replaces what is recorded of them.
        kept = known.get(runtime, {}).get("models", []) if options.names else []
        every = {one["model"]: one for one in [*kept, *map(asdict, made)]}
        known[runtime] = {"torch": torch.__version__, "models": [every[model] for model in sorted(every)]}
        page.write_text(json.dumps(known, indent=1) + "\n")
    return 1 if counts["wrong"] or counts["broken"] else 0


def _runtime() -> str:
    for package in ("onnxruntime-training-cpu", "onnxruntime"):
        try:
            return f"{package} {version(package)}"
        except ModuleNotFoundError:
            continue
    return "no onnxruntime"


if __name__ == "__main__":
    sys.exit(main())
