"""Questions that Python answers without asking the value: `a is b`, `x is None`, patterns of mappings and sequences.

They are read from the code of each function that runs while a model is traced, and looked at when their line runs.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import operator
import re
import sys
from collections.abc import Mapping
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from cpt_fx.capture.refusals import TRACE, is_traced_code, place_of, refuse
from cpt_fx.capture.traced import TracedAttribute, is_traced
from cpt_fx.meta import CALLED
from cpt_fx.optable import is_opaque


class Operand(NamedTuple):
    """What an instruction finds on the stack, as far as the code says."""

    paths: tuple[tuple[str, ...], ...] = ()
    """The variables, with attributes, that it is made of."""
    is_variable: bool = False
    """Whether it is just that variable or attribute."""
    is_called: bool = False
    """Whether some function made it, other than `type`."""
    is_none: bool = False


UNKNOWN = Operand(is_called=True)


class Question(NamedTuple):
    """An instruction that asks about its operands, or writes to where they lead."""

    kind: str
    """`is`, `match`, `store`: an attribute of an object, `outer`: a variable from outside of the function."""
    operands: tuple[Operand, ...]


class Facts(NamedTuple):
    """What a function's code asks, by line, and where it may catch what is raised in it."""

    questions: Mapping[int, list[Question]]
    caught: tuple[tuple[int, int], ...]
    """Instructions, from one to another, inside of a `try` or a `with`."""


def facts_of(code: CodeType) -> Facts | None:
    """Read the code of a function, once; None where there is nothing to look at."""
    known = _known.get(id(code))
    if known is None:
        facts = Facts(_Reader(code).questions, _caught(code)) if is_traced_code(code.co_filename) else None
        known = _known[id(code)] = code, facts if facts and any(facts) else None
    return known[1]


_known: dict[int, tuple[CodeType, Facts | None]] = {}
"""By identity, since the hash of code is slow; it is kept, so that its id stays its own."""


def _caught(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Return where an `except`, or the exit of a `with`, may catch: not one that only raises again."""
    steps = [step.opname for step in dis.get_instructions(code)]
    if not any(one == "POP_EXCEPT" and other != "RERAISE" for one, other in pairwise(steps)):
        return ()
    # Python 3.10 has no such table: there it is the whole function.
    entries = getattr(dis.Bytecode(code), "exception_entries", None)
    return ((0, sys.maxsize),) if entries is None else tuple((entry.start, entry.end) for entry in entries)


def is_caught(frame: FrameType) -> bool:
    """Whether what is raised in a function now may be caught there."""
    facts = facts_of(frame.f_code)
    return facts is not None and any(start <= frame.f_lasti < end for start, end in facts.caught)


class _Reader:
    """Follows the stack through the instructions of a function, in the order in which they are written."""

    def __init__(self, code: CodeType) -> None:
        self.stack: list[Operand] = []
        self.jumps: dict[int, list[Operand]] = {}
        """The stack at places that are jumped to."""
        self.ended = False
        """Whether the next instruction is reached by a jump only."""
        self.stored: dict[str, Operand] = {}
        """What the same line has put into variables: they do not hold it yet when the line begins."""
        self.questions: dict[int, list[Question]] = {}
        self.outer = code.co_freevars
        line = code.co_firstlineno
        starts = {offset: number for offset, number in dis.findlinestarts(code) if number is not None}
        for step in dis.get_instructions(code):
            if starts.get(step.offset, line) != line:
                line = starts[step.offset]
                self.stored.clear()
            self._arrive(step.offset)
            question = self._read(step)
            if question:
                self.questions.setdefault(line, []).append(question)
            self._leave(step)

    def _pop(self, count: int = 1) -> Operand:
        """Take operands from the stack, and return what is made of them."""
        taken = [self.stack.pop() if self.stack else UNKNOWN for _ in range(count)]
        if count == 1:
            return taken[0]
        paths = tuple(dict.fromkeys(path for operand in taken for path in operand.paths))
        return Operand(paths, is_called=any(operand.is_called for operand in taken))

    def _arrive(self, offset: int) -> None:
        """Join what comes from elsewhere."""
        jumped = self.jumps.get(offset)
        if self.ended:
            self.stack = jumped or []
        elif jumped and len(jumped) == len(self.stack) and jumped[-1] != self.stack[-1]:
            self.stack.append(jumped[-1])
            self.stack.append(self._pop(2))
        self.ended = False

    def _leave(self, step: dis.Instruction) -> None:
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            self.jumps.setdefault(step.argval, self.stack.copy())
        self.ended = step.opname.startswith(("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE", "RETURN_", "RAISE"))

    def _read(self, step: dis.Instruction) -> Question | None:
        """Take an instruction into account; return the question that it is."""
        name, value = step.opname, step.argval
        if name == "IS_OP":
            question = Question("is", (self._pop(), self._pop()))
            self.stack.append(Operand())
            return question
        if name.startswith("POP_JUMP") and name.endswith("NONE"):
            return Question("is", (self._pop(), Operand(is_none=True)))
        if name in ("MATCH_MAPPING", "MATCH_SEQUENCE"):
            question = Question("match", (self._pop(),))
            self.stack += (*question.operands, Operand())
            return question
        if name == "STORE_ATTR":
            question = Question("store", (self._pop(),))
            self._pop()
            return question
        if name == "STORE_GLOBAL" or (name == "STORE_DEREF" and value in self.outer):
            return Question("outer", (self._pop()._replace(paths=((value,),)),))
        if "_FAST" in name or name in ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF", "STORE_DEREF"):
            self._variables(step)
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            base = self._pop()
            paths = ((*base.paths[0], value),) if base.is_variable else base.paths
            self.stack += [base._replace(paths=paths, is_none=False)] * (1 + _effect(step))
        elif name == "LOAD_CONST":
            self.stack.append(Operand(is_none=value is None))
        elif name in ("COPY", "DUP_TOP") and (step.arg or 1) <= len(self.stack):
            self.stack.append(self.stack[-(step.arg or 1)])
        elif name == "SWAP" and step.arg and step.arg <= len(self.stack):
            self.stack[-1], self.stack[-step.arg] = self.stack[-step.arg], self.stack[-1]
        else:
            self._other(name, _effect(step))
        return None

    def _variables(self, step: dis.Instruction) -> None:
        """Read and write variables: newer Pythons have instructions for two of them."""
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if step.opname == "LOAD_GLOBAL":
            self.stack += [Operand()] * (_effect(step) - 1)  # a place for the object of a method
        for kind, name in zip(re.findall("LOAD|STORE|DELETE", step.opname), names, strict=False):
            if kind == "LOAD":
                self.stack.append(self.stored.get(name, Operand(((name,),), is_variable=True)))
            elif kind == "STORE":
                self.stored[name] = self._pop()

    def _other(self, name: str, effect: int) -> None:
        """Take any other instruction into account, by how much it leaves on the stack."""
        if name.startswith(("POP_", "STORE_", "DELETE_", "RETURN_", "RAISE", "RERAISE", "END_")):
            self._pop(max(-effect, 0))
        elif effect > 0:
            made = self.stack[-1] if self.stack and name.startswith(("FOR_", "UNPACK_", "GET_")) else Operand()
            self.stack += [made._replace(is_variable=False)] * effect
        elif self.stack and name not in ("NOP", "NOT_TAKEN", "KW_NAMES", "EXTENDED_ARG", "CACHE", "RESUME"):
            made = self._pop(1 - effect)
            called = name.startswith(("CALL", "PRECALL")) and ("type",) not in made.paths
            self.stack.append(made._replace(is_variable=False, is_none=False, is_called=made.is_called or called))


def _effect(step: dis.Instruction) -> int:
    return dis.stack_effect(step.opcode, step.arg if step.opcode >= dis.HAVE_ARGUMENT else None, jump=False)


def look(question: Question, frame: FrameType) -> None:
    """Give the trace up where an answer would not be true of the value that the graph has, or a write would be lost."""
    asked = [operand for operand in question.operands if not operand.is_none]
    found = [[_reach(path, frame) for path in operand.paths] for operand in asked]
    involved = any(is_traced(value) or inside for reached in found for value, inside in reached)
    values = [reached[0][0] if operand.is_variable else None for operand, reached in zip(asked, found, strict=True)]
    if question.kind == "outer":
        if not is_made_inside(asked[0].paths[0][0], frame):
            refuse(f"the code sets {asked[0].paths[0][0]} outside of itself, which a graph would not do on every call,")
    elif question.kind == "store":
        _look_at_store(asked[0], values[0], frame)
    elif question.kind == "match":
        _refuse_if(involved, "of what kind a value is")
    elif len(asked) == 1:
        is_known = asked[0].is_variable and not found[0][0][1]
        items = () if is_known else [item for value, _ in found[0] for item in traced_in(value)]
        is_unknown = involved and not (is_known and _is_there(values[0]))
        _refuse_if(is_unknown or not all(map(_is_there, items)), "whether a value is None")
    elif len(asked) == 2 and not (is_traced(values[0]) and values[0] is values[1]):
        # An item of a container, but not the type of one.
        holders = [value for each, reached in zip(asked, found, strict=True) for value, _ in reached
                   if not each.is_variable and ("type",) not in each.paths]  # fmt: skip
        involved |= any(map(traced_in, holders))
        _refuse_if(involved or all(each.is_called for each in asked), "whether two values are one")


def traced_in(value: Any) -> list[Any]:
    """Return the traced values in a container of Python."""
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return [item for item in items if is_traced(item)]


def _refuse_if(wrong: bool, what: str) -> None:
    if wrong:
        refuse(f"the code asks {what}, which torch.fx cannot answer for a value that is only traced,")


def _look_at_store(operand: Operand, value: Any, frame: FrameType) -> None:
    """Refuse writes to what was there before: classes, and objects that the code comes by as variables from outside."""
    path = operand.paths[0] if operand.is_variable else ()
    name = path[0] if path else ""
    is_outer = name and (name not in frame.f_locals or name in frame.f_code.co_freevars)
    is_older = bool(is_outer and not is_made_inside(name, frame)) or (len(path) > 1 and not hasattr(value, "__dict__"))
    is_class = isinstance(value, type) or ("type",) in operand.paths
    is_older |= isinstance(value, nn.Parameter)
    if is_class or (is_older and not isinstance(value, nn.Module) and not is_traced(value)):
        what = ".".join(path) or "a class"
        refuse(f"the code sets an attribute of {what}, which a graph would not do on every call,")


def is_made_inside(name: str, frame: FrameType | None) -> bool:
    """Whether a variable from outside of a function belongs to another function that is being traced."""
    while frame is not None and frame.f_code.co_name != TRACE:
        if name in frame.f_code.co_cellvars:
            return True
        frame = frame.f_back
    return False


def _reach(path: tuple[str, ...], frame: FrameType) -> tuple[Any, bool]:
    """Follow a path without running anybody's code: the value, and whether what is sought lies inside of a tensor."""
    for scope in (frame.f_locals, frame.f_globals, vars(builtins)):
        if path[0] in scope:
            value = scope[path[0]]
            break
    else:
        return None, False
    for name in path[1:]:
        if is_traced(value) or type(value) is nn.Parameter or type(value) is Tensor:
            return value, True
        value = _attribute(value, name)
    return value, False


def _attribute(value: Any, name: str) -> Any:
    if name == "__class__":
        return type(value)
    if issubclass(type(value), nn.Module):
        for group in ("_parameters", "_buffers", "_modules"):
            if name in value.__dict__[group]:
                return value.__dict__[group][name]
    return inspect.getattr_static(value, name, None)


def _is_there(value: Any) -> bool:
    """Whether a value is known not to be None. An argument of the model is, if the graph checks it."""
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
