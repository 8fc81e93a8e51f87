"""Small modules whose code asks what a value is, or writes what a trace does not see. One way of it in each."""

from tests.capture.asking import answered, attributes, surroundings, values, writes
from tests.capture.asking.cases import ASKING, FINE, Case

__all__ = ["ASKING", "FINE", "Case", "answered", "attributes", "surroundings", "values", "writes"]
