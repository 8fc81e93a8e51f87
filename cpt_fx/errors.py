"""Errors, and argument checks that give all packages of the library the same error messages."""

import difflib
import operator
from collections.abc import Iterable
from typing import SupportsIndex


class TransformError(ValueError):
    """A model could not be transformed as asked."""


def nearest(name: object, candidates: Iterable[str]) -> str:
    """Return `` Did you mean "CR"?`` for the candidate closest to ``name``, or an empty string."""
    # Case is ignored: "cr" for "CR" is the most common mistake, and difflib would score it zero.
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    return f' Did you mean "{by_lower[close[0]]}"?' if close else ""


def check_choice(field: str, value: object, choices: Iterable[str]) -> str:
    """Return ``value`` when it is one of ``choices``; otherwise raise an error that lists them."""
    names = list(choices)
    if isinstance(value, str) and value in names:
        return value
    listed = ", ".join(f'"{name}"' for name in names)
    raise ValueError(f"{field} must be one of {listed}, got {value!r}.{nearest(value, names)}")


def check_int(field: str, value: object, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return ``value`` as an int; reject floats and bools, which are usually a mistake, and values out of range."""
    expected = "an integer"
    if minimum is not None:
        expected += f" of at least {minimum}" if maximum is None else f" from {minimum} to {maximum}"
    # bool is a subclass of int, but a mistake as a number of bits or steps. NumPy integers pass, 8.0 does not.
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{field} must be {expected}, got {value!r} ({type(value).__name__})")
    number = operator.index(value)
    if (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
        raise ValueError(f"{field} must be {expected}, got {value!r}")
    return number


class ExportError(ValueError):
    """A model could not be exported as asked."""
