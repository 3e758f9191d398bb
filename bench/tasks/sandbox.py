"""Runs small functions that a model wrote: whitelisted syntax, a budget of steps, bounds on every value.

Every value is bounded before a call or a comparison walks through it: lists that hold each other can be far
larger to walk through than they are to build.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from typing import Any

STEPS = 5_000  # loop rounds and calls in one run
LENGTH = 1_000  # characters of a string; items of a value, those of its items included
MAGNITUDE = 10**30  # of any integer
DIGITS = 30  # that `round` may keep or drop
SOURCE = 4_000  # characters of the source


class Refused(Exception):
    """The source is not one that is run: not one function, not safe, or over its budget."""


_NODES: tuple[type[ast.AST], ...] = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.AugAssign, ast.For,
    ast.While, ast.If, ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.BinOp, ast.BoolOp, ast.UnaryOp,
    ast.Compare, ast.Call, ast.keyword, ast.Name, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict,
    ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.comprehension, ast.Subscript, ast.Slice,
    ast.IfExp, ast.JoinedStr, ast.FormattedValue, ast.Attribute, ast.Load, ast.Store, ast.Add, ast.Sub,
    ast.Mult, ast.FloorDiv, ast.Div, ast.Mod, ast.Pow, ast.And, ast.Or, ast.Not, ast.USub, ast.UAdd, ast.Eq,
    ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is, ast.IsNot,
)  # fmt: skip
_METHODS = frozenset({
    "append", "capitalize", "count", "endswith", "find", "get", "index", "insert", "isalpha", "isdigit",
    "islower", "isupper", "items", "join", "keys", "lower", "lstrip", "pop", "remove", "replace",
    "reverse", "rstrip", "sort", "split", "startswith", "strip", "swapcase", "title", "upper", "values",
})  # fmt: skip
_KEYWORDS = frozenset({"reverse", "key", "default", "start"})


def _examine(tree: ast.Module, name: str) -> None:
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef) or tree.body[0].name != name:
        raise Refused(f"the source must be one function called {name}")
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise Refused(f"{type(node).__name__} is not allowed")
        if isinstance(node, ast.FunctionDef) and (node is not tree.body[0] or node.decorator_list):
            raise Refused("inner and decorated functions are not allowed")
        if isinstance(node, ast.Name) and node.id.startswith("_") and node.id != "_":
            raise Refused(f"the name {node.id} is not allowed")
        if isinstance(node, ast.arg) and (node.arg.startswith("_") or node.arg in _BUILTINS):
            raise Refused(f"the parameter {node.arg} is not allowed")
        if isinstance(node, ast.Attribute) and (node.attr not in _METHODS or id(node) not in called):
            raise Refused(f"the attribute {node.attr} is not allowed")
        if isinstance(node, ast.Call) and any(word.arg not in _KEYWORDS for word in node.keywords):
            raise Refused("a keyword argument is not allowed")
        if isinstance(node, ast.FormattedValue) and (node.format_spec is not None or node.conversion != -1):
            raise Refused("format specifications are not allowed")
        if isinstance(node, ast.Constant) and type(node.value) not in (int, float, str, bool, type(None)):
            raise Refused(f"{type(node.value).__name__} constants are not allowed")


class _Guard(ast.NodeTransformer):
    """Sends every operation and call through a bound, and every loop round through the step counter."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        operation = ast.Constant(type(node.op).__name__)
        return _call("_bound", _call("_op", operation, node.left, node.right))

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        target = node.target
        if isinstance(target, ast.Name):
            before: ast.expr = ast.Name(target.id, ast.Load())
        elif isinstance(target, ast.Subscript):
            before = ast.Subscript(target.value, target.slice, ast.Load())
        else:
            raise Refused("augmented assignment to an attribute is not allowed")
        return ast.Assign([target], self.visit(ast.BinOp(before, node.op, node.value)))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute):
            node.func.value = _bounded(node.func.value)
        node.args = [_bounded(argument) for argument in node.args]
        return _call("_bound", node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        node.left = _bounded(node.left)
        node.comparators = [_bounded(operand) for operand in node.comparators]
        return node

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        self.generic_visit(node)
        return _call("_bound", node) if isinstance(node.ctx, ast.Load) else node

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        self.generic_visit(node)
        return ast.FormattedValue(_call("_text", node.value), -1)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.generic_visit(node)
        return _call("_bound", node)

    def _counted(self, node: ast.FunctionDef | ast.For | ast.While) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(_call("_step")))
        return node

    visit_FunctionDef = visit_For = visit_While = _counted

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        node.ifs.insert(0, _call("_step"))
        return node


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), list(arguments), [])


def _bounded(node: ast.expr) -> ast.expr:
    return node if isinstance(node, (ast.Constant, ast.Call)) else _call("_bound", node)


def _bound(value: Any) -> Any:
    if isinstance(value, int):
        if abs(value) > MAGNITUDE:
            raise Refused("a number grew too large")
    elif isinstance(value, (str, range)):
        if len(value) > LENGTH:
            raise Refused("a value grew too long")
    elif isinstance(value, _CONTAINERS):
        room, waiting = LENGTH, [value]
        while waiting:
            found = waiting.pop()
            room -= len(found)
            if room < 0:
                raise Refused("a value grew too long")
            parts = (*found, *found.values()) if isinstance(found, dict) else found
            waiting += [part for part in parts if isinstance(part, _CONTAINERS)]
    return value


_CONTAINERS = (list, tuple, set, dict)


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which walks through what an iterable yields, made to bound that as one value."""

    def bounded(values: Any, *others: Any, **options: Any) -> Any:
        if others and function is not sum:  # max(a, b)
            return function(values, *others, **options)
        return function(_bound(list(values)), *others, **options)

    return bounded


def _round(number: Any, digits: Any = None) -> Any:
    if digits is not None and not -DIGITS <= digits <= DIGITS:
        raise Refused(f"only rounding to {DIGITS} digits is allowed")
    return round(number, digits)


def _text(value: Any = "") -> str:
    """`str` of a scalar: the text of nested lists could be far larger than they are."""
    if not isinstance(value, (str, int, float, type(None))):
        raise Refused("only strings and numbers can be made strings")
    return str(value)


def _operate(operator: str, left: Any, right: Any) -> Any:
    """One binary operation; what could be large is refused before it is computed."""
    if operator == "Add":
        return left + right
    if operator == "Mult":
        for sequence, times in ((left, right), (right, left)):
            if (
                isinstance(sequence, (str, list, tuple))
                and isinstance(times, int)
                and len(sequence) * times > LENGTH
            ):
                raise Refused("a value grew too long")
        return left * right
    if operator == "Sub":
        return left - right
    if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
        raise Refused(f"{operator} of anything but numbers is not allowed")
    if operator == "FloorDiv":
        return left // right
    if operator == "Div":
        return left / right
    if operator == "Mod":
        return left % right
    if not 0 <= right <= 8:
        raise Refused("only powers from 0 to 8 are allowed")
    return left**right


_BUILTINS: dict[str, Any] = {
    function.__name__: function
    for function in (
        abs, all, any, bool, dict, divmod, enumerate, int, len, list, range, reversed, set, tuple, zip,
    )
} | {
    "max": _whole(max), "min": _whole(min), "sorted": _whole(sorted), "sum": _whole(sum), "round": _round,
    "str": _text,
}  # fmt: skip


def load(source: str, name: str) -> Callable[..., Any]:
    """The function `name` that `source` defines, guarded. Raises Refused for what is not run.

    All calls of the returned function share one budget of steps.
    """
    if len(source) > SOURCE:
        raise Refused("the source is too long")
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd comparisons and escapes
            tree = ast.parse(source)
            _examine(tree, name)
            code = compile(ast.fix_missing_locations(_Guard().visit(tree)), "<reply>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Refused(f"the source is not valid Python: {error}") from None
    left = STEPS

    def step() -> bool:
        nonlocal left
        left -= 1
        if left < 0:
            raise Refused("too many steps")
        return True

    scope: dict[str, Any] = {
        "__builtins__": {}, **_BUILTINS, "_text": _text, "_op": _operate, "_bound": _bound, "_step": step,
    }  # fmt: skip
    try:
        exec(code, scope)
    except Exception as error:  # what a default value or an annotation raises
        raise Refused(f"the definition fails: {error}") from None
    return scope[name]
