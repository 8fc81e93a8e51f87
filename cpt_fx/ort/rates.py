"""Learning rates: set by number, by a function of the update, or by a torch scheduler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Rate = float | Sequence[float]
RateFunction = Callable[[int], Rate]


class _Group(dict[str, Any]):
    """The options of a parameter group that schedulers may change."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Set an option; refuse one that is a constant of the exported update."""
        if key in ("momentum", "betas"):
            raise ValueError(
                f"{key} is a constant of the exported update, and this scheduler would change it: pass "
                "cycle_momentum=False"
            )
        super().__setitem__(key, value)


class OptimizerView(torch.optim.Optimizer):
    """What torch's learning-rate schedulers see of a `Trainer`'s optimizer: a learning rate for each group."""

    def __init__(self, rates: Sequence[float], wanted: Rate | RateFunction | None) -> None:
        groups = [_Group(params=[torch.nn.Parameter(torch.zeros(()))], lr=rate) for rate in rates]
        # Schedulers that cycle the momentum need one.
        super().__init__(groups, {"lr": 0.0, "momentum": 0.0})
        self._function = wanted if callable(wanted) else None
        if wanted is not None and not callable(wanted):
            self.write_rates(wanted)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing, since the update runs in ONNX Runtime; schedulers count the calls."""

    def rates(self) -> list[float]:
        """Return the learning rates as they were set last."""
        return [float(group["lr"]) for group in self.param_groups]

    def rates_at(self, update: int) -> NDArray[np.float64]:
        """Return the learning rates of an update, counted from 0."""
        if self._function is not None:
            self.write_rates(self._function(update))
        return np.array(self.rates(), np.float64)

    def set_rates(self, rate: Rate) -> None:
        """Set one learning rate for all groups, or one for each."""
        if self._function is not None:
            raise ValueError("learning_rate is a function of the update: the Trainer asks it before each update")
        self.write_rates(rate)

    def write_rates(self, rate: Rate) -> None:
        """Set the learning rates, whether they come from the user, a function or a file."""
        rates = list(rate) if isinstance(rate, Sequence) else [rate] * len(self.param_groups)
        if len(rates) != len(self.param_groups):
            raise ValueError(f"{len(rates)} learning rates were given for {len(self.param_groups)} parameter groups")
        for value in rates:
            if not np.isfinite(value) or value < 0:
                raise ValueError(f"a learning rate must be a finite number of at least 0, got {value!r}")
        for group, value in zip(self.param_groups, rates, strict=True):
            group["lr"] = float(value)
