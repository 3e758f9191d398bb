"""Runs small functions that a model wrote: whitelisted syntax, a budget of steps, bounds on every value."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

STEPS = 5_000  # loop rounds and calls in one run
LENGTH = 1_000  # characters or items of any value
MAGNITUDE = 10**30  # of any integer
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
_BUILTINS: dict[str, Any] = {
    function.__name__: function
    for function in (
        abs, all, any, bool, dict, divmod, enumerate, int, len, list, max, min, range, reversed, round,
        set, sorted, sum, tuple, zip,
    )
}  # fmt: skip
_SHADOWED = frozenset(_BUILTINS) | {"str"}
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
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            raise Refused(f"the name {node.id} is not allowed")
        if isinstance(node, ast.arg) and (node.arg.startswith("_") or node.arg in _SHADOWED):
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
        return _call("_op", ast.Constant(type(node.op).__name__), node.left, node.right)

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
        return _call("_bound", node)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> ast.AST:
        self.generic_visit(node)
        return ast.FormattedValue(_call("_text", node.value), -1)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.generic_visit(node)
        return _call("_bound", node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(_call("_step")))
        return node

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(_call("_step")))
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(_call("_step")))
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        node.ifs.insert(0, _call("_step"))
        return node


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(function, ast.Load()), list(arguments), [])


def _bound(value: Any) -> Any:
    if isinstance(value, int):
        if abs(value) > MAGNITUDE:
            raise Refused("a number grew too large")
    elif isinstance(value, (str, list, tuple, dict, set, range)) and len(value) > LENGTH:
        raise Refused("a value grew too long")
    return value


def _text(value: Any = "") -> str:
    """`str` of a scalar: the text of nested lists could be far larger than they are."""
    if not isinstance(value, (str, int, float, type(None))):
        raise Refused("only strings and numbers can be made strings")
    return str(value)


def _operate(operator: str, left: Any, right: Any) -> Any:
    """One binary operation; what could be large is refused before it is computed."""
    if operator == "Add":
        return _bound(left + right)
    if operator == "Sub":
        return left - right
    if operator == "Mult":
        for sequence, times in ((left, right), (right, left)):
            if (
                isinstance(sequence, (str, list, tuple))
                and isinstance(times, int)
                and len(sequence) * times > LENGTH
            ):
                raise Refused("a value grew too long")
        return _bound(left * right)
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
    return _bound(left**right)


def load(source: str, name: str) -> Callable[..., Any]:
    """The function `name` that `source` defines, guarded. Raises Refused for what is not run.

    All calls of the returned function share one budget of steps.
    """
    if len(source) > SOURCE:
        raise Refused("the source is too long")
    try:
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
        "__builtins__": {}, **_BUILTINS, "str": _text, "_text": _text, "_op": _operate, "_bound": _bound,
        "_step": step,
    }  # fmt: skip
    try:
        exec(code, scope)
    except Exception as error:  # what a default value or an annotation raises
        raise Refused(f"the definition fails: {error}") from None
    return scope[name]
