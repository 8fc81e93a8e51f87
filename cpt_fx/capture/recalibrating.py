"""Run a model at other bit-widths for a while, and recalibrate batch norm's statistics for evaluation.

`with cpt_fx.at_bits(model, 4): ...` and `with cpt_fx.recalibrate(model, batches): ...`.

Running statistics are averages over the latest training steps, at the bit-widths of those steps. Evaluation uses
another bit-width, which they fit badly after training at low ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from cpt_fx.capture.dry_run import dry_run, eager_model, tensors_in
from cpt_fx.capture.session import Session
from cpt_fx.capture.side_effects import keep_generator, unchanged
from cpt_fx.capture.standalone import transformed_in
from cpt_fx.capture.torch_private import set_version_counter
from cpt_fx.common.torch_private import BatchNorm
from cpt_fx.formats import FULL_PRECISION
from cpt_fx.ir.history import LOGGER
from cpt_fx.ir.layer_state import is_range
from cpt_fx.ir.meta import module_path
from cpt_fx.ir.result import sessions_in
from cpt_fx.ir.state import AS_SCHEDULED
from cpt_fx.overrides import Pattern, Patterns, as_patterns
from cpt_fx.schedules.bits import Bits, as_bits

FORMS = "a tensor, a tuple or list whose first item is the input, or a dict of keywords; pass call= for anything else"
TOO_FEW = "Expected more than 1 value per channel"
"""Part of torch's error message for a batch with a single value per channel."""


@contextmanager
def at_bits(model: nn.Module, bits: int | Bits) -> Iterator[None]:
    """Run a transformed model at other bit-widths inside a `with` block, in training and in evaluation.

    Nothing is captured or compiled again, running ranges do not learn, and the schedule is not affected.

    Args:
        model: what `transform` returned, or a model that contains transformed parts, which are then all affected.
        bits: the bit-width of weights and activations, while gradients keep the scheduled one; or a `Bits` for all
            three. Fixed bit-widths and schedules of single layers are kept, offsets apply. 32 switches every quantizer
            off.
    """
    widths = as_bits("bits", bits)
    forced: Bits | int = widths
    if not isinstance(bits, tuple):
        forced = FULL_PRECISION if bits == FULL_PRECISION else widths._replace(gradient=AS_SCHEDULED)
    with ExitStack() as stack:
        for _, result in transformed_in(model):
            stack.enter_context(result.state.at(forced))
            stack.enter_context(_unlearning(result.root))
        yield


@contextmanager
def _unlearning(root: nn.Module) -> Iterator[None]:
    """Replace running ranges by copies inside the block, and discard what these learn."""
    held = [
        (module, name, buffer)
        for module in root.modules()
        for name, buffer in module._buffers.items()
        if is_range(name) and buffer is not None
    ]
    copies = {id(buffer): buffer.clone() for _, _, buffer in held}
    for module, name, buffer in held:
        module._buffers[name] = copies[id(buffer)]
    try:
        yield
    finally:
        for module, name, buffer in held:
            # Unless it was loaded or moved in the meantime.
            if module._buffers.get(name) is copies[id(buffer)]:
                module._buffers[name] = buffer


class Recalibration:
    """New statistics of batch norm, in use until the `with` block ends or `restore()` is called."""

    def __init__(self, layers: dict[str, BatchNorm], found: dict[str, Tensor], sessions: list[Session]) -> None:
        self.layers = tuple(found)
        """Names of the layers that have new statistics."""
        self._old: list[tuple[BatchNorm, str, Tensor, Tensor, int]] = []
        for path, rows in found.items():
            for name, buffer, value in zip(
                ("running_mean", "running_var"), _statistics(layers[path]), rows, strict=True
            ):
                self._old.append((layers[path], name, buffer, buffer.clone(), buffer._version))
                with torch.no_grad():
                    buffer.copy_(value)
        self._lags = [(session, session.trained_at) for session in sessions]
        for session in sessions:
            session.trained_at = None

    def restore(self) -> None:
        """Restore the old statistics; a second call does nothing."""
        old, self._old = self._old, []
        for layer, name, buffer, value, version in old:
            now = layer.get_buffer(name)  # another tensor if the model was moved
            with torch.no_grad():
                now.copy_(value)
            if now is buffer:
                # To a pending backward pass the buffer is unchanged.
                set_version_counter((buffer,), (version,))
        lags, self._lags = self._lags, []
        for session, widths in lags:
            session.trained_at = session.trained_at or widths

    def __enter__(self) -> Recalibration:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def recalibrate(
    model: nn.Module,
    batches: Iterable[Any],
    bits: int | Bits | None = None,
    *,
    call: Callable[[nn.Module, Any], object] | None = None,
    exclude: Pattern | Iterable[Pattern] = (),
) -> Recalibration:
    """Estimate batch norm's statistics anew from training data, at the bit-width of evaluation.

    It runs immediately, in place. Use `with cpt_fx.recalibrate(model, batches):` around an evaluation: on exit the old
    statistics are restored, and training continues unaffected. `.restore()` of the returned object does the same.
    Without either, the new statistics stay.

    Each layer gets the mean over the batches, weighted by their size, of the means and of the variances that it sees.
    All other layers run in evaluation mode, nothing learns, and all other state is restored: modes, buffers, counters,
    random state. Layers that `model.train()` leaves frozen keep their statistics. In a process group, statistics are
    averaged over all processes: call it in every one.

    Args:
        model: what `transform` returned, or any module, also inside torch.compile or DistributedDataParallel.
        batches: training data, all of which is used; for ten batches, `list(itertools.islice(loader, 10))`. A batch is
            a tensor, a tuple or list whose first item is the model's input, or a dict of keyword arguments. A batch in
            which batch norm finds a single value per channel is skipped.
        bits: None for the current bit-width of evaluation; otherwise as for `at_bits`.
        call: a function `(model, batch)` that runs the model on any other kind of batch.
        exclude: names, globs or types of modules whose batch norm is left as it is.
    """
    if bits is not None:
        as_bits("bits", bits)
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise TypeError(f"batches must be several batches, got a {type(batches).__name__}: put one batch into a list")
    wrapper = next((one for one in model.modules() if isinstance(one, DistributedDataParallel)), None)
    model = eager_model(model)
    sessions = [session for _, session in sessions_in(model)]
    layers, found = batch_norms(model, exclude), dict[str, Tensor]()
    lazy = [name for name, layer in layers.items() if is_lazy(layer.running_mean)]  # type: ignore[arg-type]
    if lazy:
        raise ValueError(f"{lazy[0]} does not know its channels yet: run the model once before recalibrate")
    if layers:
        with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
            for put_back in _generators(batches, 3):
                stack.callback(put_back)
            stack.enter_context(dry_run(model))
            for session in sessions:  # a session's root may be outside of `model`
                stack.callback(setattr, session.root, "training", session.root.training)
                session.root.training = False
            layers = _alone_in_training(model, layers)
            if layers:
                if bits is not None:
                    stack.enter_context(at_bits(model, bits))
                found = _averages(_sums(model, layers, batches, call or _call), wrapper)
    for place in dict.fromkeys(place for session in sessions for place in _without_layer(session)):
        LOGGER.warning("batch norm in the code of %s is a function, not a layer: its statistics stay", place)
    return Recalibration(layers, found, [session for session in sessions if isinstance(session, Session)])


def batch_norms(model: nn.Module, exclude: Pattern | Iterable[Pattern] = ()) -> dict[str, BatchNorm]:
    """Return the batch norm layers that have running statistics, by name."""
    patterns = Patterns(as_patterns(exclude), "exclude")
    modules = list(model.named_modules(remove_duplicate=False))
    kinds = {path: type(module) for path, module in modules}
    layers, excluded = dict[int, tuple[str, BatchNorm]](), set[int]()
    for path, module in modules:
        if isinstance(module, BatchNorm) and module.running_mean is not None:
            layers.setdefault(id(module), (path, module))
            places = [place for place in kinds if place in ("", path) or path.startswith(f"{place}.")]
            if patterns.matches(path, [(place, kinds[place]) for place in places]):
                excluded.add(id(module))
    patterns.check((), kinds.items())
    for pattern in patterns.patterns:
        if pattern not in patterns.used:
            LOGGER.warning("exclude %r selects no batch norm: no effect", pattern)
    return {path: module for key, (path, module) in layers.items() if key not in excluded}


def learns_statistics(model: nn.Module) -> bool:
    """Return whether any batch norm layer of a model gathers statistics in training."""
    with unchanged(model):
        model.train()
        return any(layer.training for layer in batch_norms(model).values())


def _alone_in_training(model: nn.Module, layers: dict[str, BatchNorm]) -> dict[str, BatchNorm]:
    """Put only those layers into training mode that `model.train()` would; return them."""
    model.train()
    layers = {name: layer for name, layer in layers.items() if layer.training}
    model.eval()
    for layer in layers.values():
        layer.training = True
        # With momentum 0 nothing would be learned. Other values are kept: Dynamo treats a changed attribute as dynamic.
        layer.momentum = 1.0 if layer.momentum == 0 else layer.momentum
    return layers


def _sums(
    model: nn.Module, layers: dict[str, BatchNorm], batches: Iterable[Any], call: Callable[[nn.Module, Any], object]
) -> dict[str, Tensor]:
    """Run all batches; return for each layer three rows: the sums of weights, weighted means, weighted variances."""
    sums = {name: torch.zeros(3, len(_statistics(layer)[0]), dtype=torch.float64) for name, layer in layers.items()}
    sizes = []
    for batch in batches:
        for layer in layers.values():
            for value in (*_statistics(layer), *_counter(layer)):
                value.zero_()
        size = _size(batch)
        try:
            if size:
                call(model, batch)
        except ValueError as error:
            if TOO_FEW not in str(error):
                raise
            size = 0
        sizes.append(size)
        for name, layer in layers.items():
            mean, variance = (value.cpu().double() for value in _statistics(layer))
            # A layer of the user's own may not count its batches.
            runs = max(int(bool(mean.any() or variance.any())), *map(int, _counter(layer)), 0)
            if runs and size:
                # The statistics started at zero: `whole` is the total weight of the calls in them.
                whole = 1 if layer.momentum is None else 1 - (1 - layer.momentum) ** runs
                sums[name] += size * torch.stack([torch.ones_like(mean), mean / whole, variance / whole])
    if 0 in sizes:
        LOGGER.warning(
            "recalibrate skipped %d of %d batches: batch norm needs more than one value per channel",
            sizes.count(0), len(sizes),
        )  # fmt: skip
    return sums


def _averages(sums: dict[str, Tensor], wrapper: DistributedDataParallel | None) -> dict[str, Tensor]:
    """Return mean and variance of each layer that ran, over the whole process group."""
    group = None if wrapper is None else wrapper.process_group
    if sums and distributed.is_available() and distributed.is_initialized() and distributed.get_world_size(group) > 1:
        device = torch.device("cuda" if distributed.get_backend(group) == "nccl" else "cpu")
        flat = torch.cat([rows.flatten() for rows in sums.values()]).to(device)
        distributed.all_reduce(flat, group=group)
        parts = flat.cpu().split([rows.numel() for rows in sums.values()])
        sums = {name: part.view(3, -1) for name, part in zip(sums, parts, strict=True)}
    found = {name: rows[1:] / rows[0] for name, rows in sums.items() if rows[0].any()}
    if not found:
        raise ValueError("recalibrate needs batches that batch norm can learn from: there were none")
    broken = [name for name, values in found.items() if not values.isfinite().all()]
    if broken:
        raise ValueError(f"batch norm in {broken[0]} sees values that are not finite in these batches")
    idle = [name for name in sums if name not in found]
    if idle:
        LOGGER.warning("%s did not run in any batch: the statistics there stay", ", ".join(idle))
    return found


def _statistics(layer: BatchNorm) -> tuple[Tensor, Tensor]:
    mean, variance = layer.running_mean, layer.running_var
    assert mean is not None and variance is not None
    return mean, variance


def _counter(layer: BatchNorm) -> tuple[Tensor, ...]:
    return () if layer.num_batches_tracked is None else (layer.num_batches_tracked,)


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, (tuple, list)) and batch:
        model(batch[0])
    elif isinstance(batch, Tensor):
        model(batch)
    else:
        raise TypeError(f"a batch must be {FORMS}, got {type(batch).__name__}")


def _size(batch: Any) -> int:
    """Return how many examples a batch holds, 1 if that is unknown."""
    if isinstance(batch, (tuple, list)) and batch and isinstance(batch[0], (tuple, list)):
        # Several inputs, or images of several sizes: count the labels that come with them.
        labels = batch[1] if len(batch) > 1 else batch[0]
        return len(labels) if isinstance(labels, (tuple, list)) else _size(labels)
    found = next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), None)
    if found is not None:
        return found
    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(first, (str, Mapping, tuple, list)):
        with suppress(TypeError):  # arrays, and objects of the user's own
            return len(first)
    return 1


def _without_layer(session: Session) -> Iterator[str]:
    """Yield the modules whose code calls batch norm as a function, as far as there are graphs of it."""
    modules = dict(session.root.named_modules(remove_duplicate=False))
    for node in (node for graph in session.graphs() for node in graph.graph.nodes if node.op == "call_function"):
        if "batch_norm" in getattr(node.target, "__name__", ""):
            path, _ = module_path(node)
            if not isinstance(modules.get(path), BatchNorm):
                yield path or session.kind


def _generators(holder: object, depth: int) -> Iterator[Callable[[], object]]:
    """Yield a function that restores each random number generator in a loader, its sampler and its dataset."""
    for value in getattr(holder, "__dict__", {}).values():
        put_back = keep_generator(value)
        if put_back is not None:
            yield put_back
        elif depth and not isinstance(value, (type, ModuleType)):
            yield from _generators(value, depth - 1)
