"""Rules over the columns of a file, evaluated by pyarrow: `rating >= 4 and country in ("BR", "PT")`."""

from __future__ import annotations

import ast
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from persia.data.column_values import Values
from persia.errors import ConfigError, DataError, PersiaError

__all__ = ["Expression", "Rule"]

Rule: TypeAlias = str | Callable[..., Any]
"""An expression, or a function of pyarrow arrays whose parameters are named like columns."""

_COMPARISONS = {
    ast.Eq: "equal",
    ast.NotEq: "not_equal",
    ast.Lt: "less",
    ast.LtE: "less_equal",
    ast.Gt: "greater",
    ast.GtE: "greater_equal",
}
_ARITHMETIC = {ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Div: "divide"}
_GRAMMAR = (
    'columns (one whose name is not an identifier as column("its name")), numbers, "texts", True, False, '
    "== != < <= > >=, in (...), not in (...), is None, is not None, + - * /, and, or, not"
)
_NODES = (
    ast.BoolOp, ast.UnaryOp, ast.Compare, ast.BinOp, ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Call, ast.Load,
    ast.And, ast.Or, ast.Not, ast.USub, ast.In, ast.NotIn, ast.Is, ast.IsNot, *_COMPARISONS, *_ARITHMETIC,
)  # fmt: skip
_MAX_DEPTH = 100
_MAX_SHOWN = 200


@dataclass(frozen=True)
class Expression:
    """A parsed rule.

    A text column that is compared with a number, or used in arithmetic, is read as numbers, so CSV and Parquet give the
    same result. Arithmetic is in float64. A date or timestamp may be compared with an ISO text. A comparison with a
    missing value (null, NaN, an empty text) is missing.

    Args:
        owner: argument that holds the rule, for error messages.
        rule: see `Rule`.

    Raises:
        ConfigError: the rule is neither an expression of this grammar nor a function of columns.
    """

    owner: str
    rule: Rule

    def __post_init__(self) -> None:
        if isinstance(self.rule, str):
            self._check(_parsed(self))
        elif not callable(self.rule):
            raise ConfigError(
                f"{self.owner} = {self.rule!r}: write an expression as a text, or give a function.", field=self.owner
            )
        if not self.columns:
            raise self._invalid("it names no column")

    def __str__(self) -> str:
        if not isinstance(self.rule, str):
            return f"function of {', '.join(self.columns)}"
        return repr(self.rule if len(self.rule) <= _MAX_SHOWN else self.rule[:_MAX_SHOWN] + "...")

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that the rule uses, in order of appearance."""
        if not isinstance(self.rule, str):
            return self._parameters(self.rule)
        calls: dict[int, str] = {}
        names: list[str] = []
        for node in ast.walk(_parsed(self)):  # A call comes before the name `column` in it.
            if isinstance(node, ast.Call):
                calls[id(node.func)] = _column(node)
            elif isinstance(node, ast.Name):
                names.append(calls.get(id(node), node.id))
        return tuple(dict.fromkeys(names))

    def evaluate(self, columns: Mapping[str, Any], rows: int) -> Any:
        """Evaluates the rule for each row.

        Args:
            columns: pyarrow array `[rows]` by name.
            rows: number of rows.

        Returns:
            A pyarrow array of booleans or numbers `[rows]`, null where an input is missing.

        Raises:
            DataError: the types do not match; the message names the rule.
        """
        import pyarrow as pa

        try:
            if isinstance(self.rule, str):
                values = Values({name: columns[name] for name in self.columns})
                result = _evaluate(_parsed(self), values)
                return pa.repeat(result, rows) if isinstance(result, (pa.Scalar, bool, int, float, str)) else result
            result = self.rule(*(_readable(columns[name]) for name in self.columns))
            result = result if isinstance(result, (pa.Array, pa.ChunkedArray)) else pa.array(result)
        except PersiaError as error:
            raise DataError(f"{self.owner} = {self}: {error.message}", **error.fields) from error
        except Exception as error:  # The function and pyarrow may raise anything.
            raise DataError(
                f"{self.owner} = {self} cannot be evaluated ({type(error).__name__}: {error}); correct it.",
                field=self.owner,
            ) from error
        if len(result) != rows:
            raise DataError(
                f"{self.owner} = {self} gives {len(result)} values for {rows} rows; return one for each row.",
                field=self.owner,
            )
        return result

    def _parameters(self, function: Callable[..., Any]) -> tuple[str, ...]:
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError as error:
            raise self._invalid_function() from error
        if any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters) or not parameters:
            raise self._invalid_function()
        return tuple(p.name for p in parameters)

    def _check(self, tree: ast.expr) -> None:
        lists: set[int] = set()
        nones: set[int] = set()
        layer: list[ast.AST] = [tree]
        depth = 0
        while layer:  # Outer nodes come before inner ones.
            depth += 1
            if depth > _MAX_DEPTH:
                raise self._invalid(f"it is nested more than {_MAX_DEPTH} deep")
            for node in layer:
                if not isinstance(node, _NODES):
                    raise self._invalid(f"{type(node).__name__} is not supported")
                if isinstance(node, ast.Call) and not _column(node):
                    raise self._invalid('the only function is column("name")')
                if isinstance(node, ast.Compare):
                    for operator, other in zip(node.ops, node.comparators, strict=True):
                        if isinstance(operator, (ast.In, ast.NotIn)):
                            if not isinstance(other, (ast.Tuple, ast.List)) or not other.elts:
                                raise self._invalid('a list of values follows `in`, such as ("a", "b")')
                            lists.add(id(other))
                        if isinstance(operator, (ast.Is, ast.IsNot)):
                            if not (isinstance(other, ast.Constant) and other.value is None):
                                raise self._invalid("only None follows `is`; write ==")
                            nones.add(id(other))
                if isinstance(node, (ast.Tuple, ast.List)) and id(node) not in lists:
                    raise self._invalid("a list of values may only follow `in`")
                if isinstance(node, ast.Constant):
                    self._check_constant(node.value, id(node) in nones)
            layer = [child for node in layer for child in ast.iter_child_nodes(node)]

    def _check_constant(self, value: object, may_be_none: bool) -> None:
        if value is None and not may_be_none:
            raise self._invalid("None may only follow `is`; write `is None`")
        if value == "":
            raise self._invalid("an empty text is a missing value; write `is None`")
        if not isinstance(value, (str, bool, int, float, type(None))):
            raise self._invalid(f"{value!r} is neither a number nor a text")
        if isinstance(value, (int, float)) and not (math.isfinite(value) and value < 2**64):
            raise self._invalid("it has a number above 2**64 - 1")

    def _invalid(self, why: str) -> ConfigError:
        return ConfigError(f"{self.owner} = {self}: {why}. An expression has {_GRAMMAR}.", field=self.owner)

    def _invalid_function(self) -> ConfigError:
        return ConfigError(
            f"{self.owner}: the parameters of the function must be names of columns, one or more; it has others.",
            field=self.owner,
        )


def _parsed(expression: Expression) -> ast.expr:
    assert isinstance(expression.rule, str)
    try:
        return _parse(expression.rule)
    except (SyntaxError, ValueError) as error:
        why = error.msg if isinstance(error, SyntaxError) else str(error)
        raise expression._invalid(why) from error
    except (RecursionError, MemoryError) as error:
        raise expression._invalid(f"it is nested more than {_MAX_DEPTH} deep") from error


@functools.lru_cache(maxsize=64)
def _parse(rule: str) -> ast.expr:
    return ast.parse(f"({rule}\n)", mode="eval").body  # In parentheses it may have several lines.


def _column(node: ast.Call) -> str:
    """Returns the name in `column("name")`; empty for another call."""
    if isinstance(node.func, ast.Name) and node.func.id == "column" and not node.keywords:
        match node.args:
            case [ast.Constant(value=str(name))]:
                return name
    return ""


def _readable(column: Any) -> Any:
    """Converts a column for a function: texts of CSV to texts instead of bytes."""
    import pyarrow as pa

    return column.cast(pa.string()) if pa.types.is_binary(column.type) else column


def _evaluate(node: ast.expr, values: Values) -> Any:
    import pyarrow.compute as pc

    match node:
        case ast.Constant(value=constant):
            return constant
        case ast.Name(id=name):
            return values.column(name)
        case ast.Call():
            return values.column(_column(node))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return pc.invert(values.truth(_evaluate(operand, values)))
        case ast.UnaryOp(operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.UnaryOp(operand=operand):
            return pc.negate(values.floats(_evaluate(operand, values)))
        case ast.BoolOp(op=boolean, values=parts):
            combine = pc.and_kleene if isinstance(boolean, ast.And) else pc.or_kleene
            return functools.reduce(combine, [values.truth(_evaluate(part, values)) for part in parts])
        case ast.BinOp(left=left, op=operator, right=right):
            operands = [values.floats(_evaluate(part, values)) for part in (left, right)]
            return pc.call_function(_ARITHMETIC[type(operator)], operands)
        case ast.Compare(left=left, ops=operators, comparators=others):
            pairs = zip(operators, (left, *others), others, strict=False)
            return functools.reduce(pc.and_kleene, [_compare(*pair, values) for pair in pairs])
    raise AssertionError(ast.dump(node))


def _compare(operator: ast.cmpop, left: ast.expr, right: ast.expr, values: Values) -> Any:
    import pyarrow.compute as pc

    one = _evaluate(left, values)
    if isinstance(operator, (ast.Is, ast.IsNot)):
        return pc.is_null(one) if isinstance(operator, ast.Is) else pc.is_valid(one)
    if isinstance(operator, (ast.In, ast.NotIn)):
        assert isinstance(right, (ast.Tuple, ast.List))
        equal = [values.compare("equal", one, _evaluate(element, values)) for element in right.elts]
        member = functools.reduce(pc.or_kleene, equal)
        return member if isinstance(operator, ast.In) else pc.invert(member)
    return values.compare(_COMPARISONS[type(operator)], one, _evaluate(right, values))
