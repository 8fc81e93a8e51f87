"""Models as programs of torch.export, for tests that take both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

import cpt_fx
from cpt_fx.schedules import Schedule
from tests.training import fresh

PROGRAM = "program"
"""Stands among the values of `capture` for a model that is exported first."""


def program_of(model: nn.Module, *args: Any, **kwargs: Any) -> ExportedProgram:
    """Export with every size left open where the code allows that."""
    args, kwargs = fresh(args), fresh(kwargs)
    shapes = torch.export.ShapesCollection()
    for value in pytree.tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and value.ndim:
            shapes[value] = (torch.export.Dim.AUTO,) * value.ndim
    return torch.export.export(model, args, kwargs, dynamic_shapes=shapes.dynamic_shapes(model, args, kwargs))


def taken(model: nn.Module, schedule: Schedule, capture: str, example: tuple[Tensor, ...], **options: Any) -> nn.Module:
    """Transform a model, or its program."""
    if capture == PROGRAM:
        return cpt_fx.transform(program_of(model, *example), schedule, **options)
    return cpt_fx.transform(model, schedule, capture=capture, example_inputs=example, **options)
