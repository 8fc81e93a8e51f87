"""The traced value: a torch.fx proxy that records operators, and refuses questions that it would answer wrongly."""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import Tensor, fx

from cpt_fx.capture.symbolic.refusals import asks, is_machine, note, place_of, refuse, refuse_question
from cpt_fx.ir.meta import CALLED
from cpt_fx.operators import is_opaque


class _Kind(type):
    """Metaclass of traced values; refuses code that asks for their type, by `type(x) == Tensor` or a dict of types."""

    def __eq__(cls, other: object) -> bool:
        refuse_question("for the type of a value", sys._getframe(1))
        return cls is other

    def __hash__(cls) -> int:
        refuse_question("for the type of a value", sys._getframe(1))
        return type.__hash__(cls)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        refuse_question("for a new value of a value's type", sys._getframe(1))
        return type.__call__(cls, *args, **kwargs)

    def __getattribute__(cls, name: str) -> Any:
        if name in ("__name__", "__qualname__", "__module__", "__mro__", "__bases__"):
            refuse_question("for the name of a value's type", sys._getframe(1))
        return type.__getattribute__(cls, name)


_READS = frozenset(("LOAD_ATTR", "LOAD_METHOD", "MATCH_CLASS"))


class Traced(fx.Proxy, metaclass=_Kind):
    """A value of a graph under construction."""

    tracer: Any

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class; refused where code asks for it (`x.__class__`, a pattern, dispatch by type), but not to torch."""
        frame = sys._getframe(1)
        if not is_machine(frame.f_code.co_filename) and _instruction(frame) in _READS:
            refuse_question("for the class of a value", frame)
        return type(self)

    def __getattr__(self, name: str) -> Any:
        self.tracer.read(name, sys._getframe(1))
        return TracedAttribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if asks(sys._getframe(1)):
            refuse(f"the code sets .{name} of a tensor, which torch.fx would not do when the graph runs,")
        object.__setattr__(self, name, value)

    def __getattribute__(self, name: str) -> Any:
        if name in _OURS and asks(sys._getframe(1)):
            if name == "__dict__":
                refuse("the code asks for the attributes of a value, which torch.fx cannot know,")
            return TracedAttribute(self, name)
        return object.__getattribute__(self, name)

    def __repr__(self) -> str:
        refuse_question("for the text of a value", sys._getframe(1))
        return fx.Proxy.__repr__(self)

    def __hash__(self) -> int:
        refuse_question("a table or a set for a value", sys._getframe(1))
        return id(self)

    def __dir__(self) -> NoReturn:
        refuse("the code asks for the attributes of a value, which torch.fx cannot know,")

    def __iter__(self) -> Iterator[Any]:
        """Unpack a value into as many names as the assignment has. (torch.fx's own method keeps frames alive.)"""
        caller = sys._getframe(1)
        into = next(step for step in dis.get_instructions(caller.f_code) if step.offset == caller.f_lasti)
        if into.opname != "UNPACK_SEQUENCE":
            return self.tracer.iter(self)  # type: ignore[no-any-return]
        return (operator.getitem(self, place) for place in range(into.argval))

    def __setitem__(self, place: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, place, value), {})

    def __int__(self) -> NoReturn:
        raise note(fx.proxy.TraceError("a value that is only traced is no number"))

    __float__ = __complex__ = __int__

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse("the code copies a tensor by copy or pickle, which torch.fx would not do when the graph runs,")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(4)


class TracedAttribute(Traced, fx.proxy.Attribute):
    """An attribute of a traced value, which becomes a node once it is used."""

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        """The node, made on first use. (torch.fx would record the `getattr` that replaces Python's while tracing.)"""
        if self._node is None:
            self._node = self.tracer.create_proxy("call_function", _getattr, (self.root, self.attr), {}).node
        return self._node


_getattr = getattr


_OURS = frozenset(("node", "tracer", "root", "attr", "_node", "__dict__"))
"""Attributes of the proxy itself; the value it stands for may have attributes of the same names."""


def _instruction(frame: Any) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] if frame.f_lasti >= 0 else ""


_NAMES = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "ilshift", "irshift")
"""Augmented assignments. `@=` is not among them: tensors have no such update, so Python makes a new tensor."""


def _update(name: str) -> Callable[[Any, Any], Any]:
    """Return a wrapper of an `operator` function: for the function itself, fx prints `n += 1`, wrong for integers."""
    operation = getattr(operator, name)

    def update(target: Any, value: Any) -> Any:
        return operation(target, value)

    update.__name__ = update.__qualname__ = name
    return update


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: self.tracer.create_proxy("call_function", function, (self, *args), {})


for _name in _NAMES:
    # torch.fx itself records `x + y`, which loses the update where memory is shared.
    globals()[_name] = _update(_name)  # graphs are pickled by these names
    setattr(Traced, f"__{_name}__", _recorded(globals()[_name]))


def is_traced(value: Any) -> bool:
    """Return whether a value is a traced value, or the class of one, without calling any of its methods."""
    return type(value) is Traced or type(value) is TracedAttribute or type(value) is _Kind


def traced_in(value: Any) -> list[Any]:
    """Return the traced values in a dict, list or tuple."""
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return [item for item in items if is_traced(item)]


def is_there(value: Any) -> bool:
    """Return whether a value is known not to be None, as are arguments of the model, which the graph checks."""
    if type(value) is TracedAttribute:
        return False
    if not is_traced(value):
        return True
    node = value.node
    if node.op == "placeholder":
        value.tracer.asked.setdefault(str(node.target), place_of(sys._getframe(3)))
        return not str(node.target).startswith("*")
    if node.op == "call_method":
        return hasattr(Tensor, node.target)
    return CALLED not in node.meta and node.target not in (getattr, operator.getitem) and not is_opaque(node.target)
