"""Expressions become the operators that they stand for, in the order in which Python would compute them."""

import pytest

from cpt_fx.export.expressions import onnx_text


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("y = x", ["y = Identity (x)"]),
        ("y = a - b * c", ["value_1 = Mul (b, c)", "y = Sub (a, value_1)"]),
        ("y = (a - b) / -c", ["value_1 = Sub (a, b)", "value_2 = Neg (c)", "y = Div (value_1, value_2)"]),
        ("y = -3", ["y = Constant <value = int64 {-3}> ()"]),
        ("y = True", ["y = Constant <value = bool {1}> ()"]),
        ("y = int64([0, -1])", ["y = Constant <value = int64[2] {0, -1}> ()"]),
        ("y = x + 1.0\n    z = 1.0 * x", [
            "constant_0 = Constant <value = float {1.0}> ()", "y = Add (x, constant_0)", "z = Mul (constant_0, x)",
        ]),
        ("y = x == 1", ["constant_0 = Constant <value = int64 {1}> ()", "y = Equal (x, constant_0)"]),
        ("y = a or not b", ["value_1 = Not (b)", "y = Or (a, value_1)"]),
        ("y = uint64(1) << uint64(n)", [
            "constant_0 = Constant <value = uint64 {1}> ()", "value_2 = Cast <to = 13> (n)",
            'y = BitShift <direction = "LEFT"> (constant_0, value_2)',
        ]),
        ("a, b = TopK(x, k, largest=0)", ["a, b = TopK <largest = 0> (x, k)"]),
        ("y = F(x, reduction='add')", ['y = F <reduction = "add"> (x)']),
        ("y = Constant(value_float=attribute.kept)", ["y = Constant <value_float: float = @kept> ()"]),
        ("y = Constant(value=attribute.eps)", ["y = Constant <value: tensor = @eps> ()"]),
    ],
)  # fmt: skip
def test_it_is_written_from_the_inside_out(body: str, lines: list[str]) -> None:
    assert onnx_text(body).splitlines() == lines


def test_what_is_no_statement_of_one_value_is_an_error() -> None:
    with pytest.raises(AssertionError, match="x \\+= 1"):
        onnx_text("x += 1")
