"""The pipeline: the passes that a transform runs, in order."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram

from cpt_fx.errors import check_choice, nearest
from cpt_fx.ir.pass_base import STAGES, Pass, Report, recompile
from cpt_fx.overrides import Pattern, as_patterns
from cpt_fx.passes.annotate import Annotate
from cpt_fx.passes.bind import Bind
from cpt_fx.passes.decompose import Decompose
from cpt_fx.passes.insert import Insert
from cpt_fx.passes.lower import Lower
from cpt_fx.passes.normalize import Normalize
from cpt_fx.passes.share import Share
from cpt_fx.passes.verify import Verify
from cpt_fx.recipes import Recipe, integer, resolve
from cpt_fx.schedules.base import Schedule


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a transform; each fills the field of its name in every pass that has one. None means not set."""

    schedule: Schedule | None = None
    recipe: Recipe | None = None
    exclude: tuple[Pattern, ...] | None = None
    overrides: Mapping[Pattern, Any] | None = None
    execution: str | None = None


def _with_settings(settings: Settings, passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Return the passes with their unset fields filled from the settings.

    A value set on one pass holds for all passes, in place of the setting; two passes that disagree are an error.
    """
    values: dict[str, Any] = {}
    for name in (setting.name for setting in fields(Settings)):
        given = [step for step in passes if getattr(step, name, None) is not None]
        for step in given[1:]:
            if getattr(step, name) != getattr(given[0], name):
                raise ValueError(
                    f"passes {given[0].name!r} and {step.name!r} disagree: {name}={getattr(given[0], name)!r} and "
                    f"{name}={getattr(step, name)!r}. Set it on one of them, or to the same on both"
                )
        values[name] = getattr(given[0] if given else settings, name)
    return tuple(_filled(step, values) for step in passes)


def _filled(step: Pass, values: Mapping[str, Any]) -> Pass:
    unset = [one.name for one in fields(step) if one.init and getattr(step, one.name) is None]
    return replace(step, **{name: values[name] for name in unset if name in values})


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection in the block: a growing graph holds no garbage, and repeated scans of it are slow."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, repr=False)
class Pipeline:
    """An immutable list of passes: `after`, `before`, `replace` and `drop` return a new one."""

    passes: tuple[Pass, ...]
    settings: Settings = field(default_factory=Settings)
    """Values for the fields that the passes leave unset."""

    def __post_init__(self) -> None:
        """Check that all items are passes, and that no two of them disagree on a setting."""
        for step in self.passes:
            if not isinstance(step, Pass):
                raise TypeError(f"a pipeline is made of passes, got {step!r}")
        _with_settings(self.settings, self.passes)

    @classmethod
    def standard(
        cls,
        *,
        recipe: Recipe | str | None = None,
        exclude: Iterable[Pattern] | Pattern = (),
        overrides: Mapping[Pattern, Any] | None = None,
        schedule: Schedule | None = None,
        execution: str = "simulated",
    ) -> Pipeline:
        """Return the pipeline that `transform` runs."""
        if recipe is None and execution == "integer":
            recipe = integer()
        settings = Settings(
            schedule=schedule,
            recipe=resolve(recipe),
            exclude=as_patterns(exclude),
            overrides=dict(overrides or {}),
        )
        return cls((Normalize(), Decompose(), Annotate(), Insert(), Share(), Bind()), settings).executing(execution)

    def __deepcopy__(self, memo: dict[int, Any]) -> Pipeline:
        """Return the pipeline itself: a copied model follows the same schedule."""
        return self

    def executing(self, execution: str) -> Pipeline:
        """Return the pipeline for an execution mode; for `"integer"`, append `Lower` if no pass lowers."""
        check_choice("execution", execution, ("simulated", "integer"))
        settings = replace(self.settings, execution=execution)
        lowers = execution == "simulated" or any(step.reaches == STAGES[-1] for step in self.passes)
        return Pipeline(self.passes if lowers else (*self.passes, Lower()), settings)

    def following(self, schedule: Schedule) -> Pipeline:
        """Return the pipeline with its schedule set."""
        return Pipeline(self.passes, replace(self.settings, schedule=schedule))

    @property
    def binds(self) -> bool:
        """Whether one of the passes binds the bit-widths to a schedule."""
        return any(step.reaches == "bound" for step in self.passes)

    @no_collection()
    def run(self, module: fx.GraphModule) -> tuple[Report, ...]:
        """Run every pass on a graph, in place, and verify the graph after each of them."""
        reports = []
        for step in self:
            reports.append(step.apply(module))
            Verify(after=step.name).run(module)
        recompile(module)
        return tuple(reports)

    def transform(
        self,
        model: nn.Module | ExportedProgram,
        schedule: Schedule,
        *,
        example_inputs: tuple[Any, ...] | None = None,
        example_kwargs: dict[str, Any] | None = None,
        capture: str = "auto",
        execution: str = "simulated",
        strict: bool = False,
        prove: bool = True,
    ) -> nn.Module:
        """Do what `cpt_fx.transform` does, with these passes."""
        # Deferred import of the layer above: api runs the standard pipeline, this method any other.
        from cpt_fx.api import examples_of, transform_with

        examples = examples_of(example_inputs, example_kwargs)
        return transform_with(self.executing(execution), model, schedule, examples, capture, strict, prove)

    def after(self, name: str, step: Pass) -> Pipeline:
        """Return a pipeline with a pass inserted after the one of that name."""
        return self._spliced(name, 1, 1, step)

    def before(self, name: str, step: Pass) -> Pipeline:
        """Return a pipeline with a pass inserted before the one of that name."""
        return self._spliced(name, 0, 0, step)

    def replace(self, name: str, step: Pass) -> Pipeline:
        """Return a pipeline with the pass of that name replaced."""
        return self._spliced(name, 0, 1, step)

    def drop(self, name: str) -> Pipeline:
        """Return a pipeline without the pass of that name."""
        return self._spliced(name, 0, 1)

    def __iter__(self) -> Iterator[Pass]:
        """Iterate over the passes as they run, with the settings filled in."""
        return iter(_with_settings(self.settings, self.passes))

    def __repr__(self) -> str:
        """Return all passes with all their fields: a full record of what runs."""
        return f"Pipeline(passes={tuple(self)!r})"

    def _spliced(self, name: str, start: int, stop: int, *steps: Pass) -> Pipeline:
        """Return a pipeline with the passes from `start` to `stop`, relative to the named one, replaced by `steps`."""
        names = [step.name for step in self.passes]
        if name not in names:
            raise ValueError(f"no pass {name!r} in this pipeline; there are {names}.{nearest(name, names)}")
        place = names.index(name)
        return Pipeline((*self.passes[: place + start], *steps, *self.passes[place + stop :]), self.settings)
