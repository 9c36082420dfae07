"""Rules over the columns of a file, evaluated by pyarrow: `rating >= 4 and country in ("BR", "PT")`."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from persia.batching.columns import number_column
from persia.errors import ConfigError, DataError, PersiaError

__all__ = ["Expression", "Rule", "compare"]

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
    'columns (one that is no identifier as column("its name")), numbers, "texts", True, False, None, '
    "== != < <= > >=, in, not in, is None, + - * /, and, or, not"
)


@dataclass(frozen=True)
class Expression:
    """A rule, ready to be evaluated.

    In a text column a comparison with a number, or arithmetic, reads the texts as numbers; so CSV and Parquet give the
    same. A date or timestamp may be compared with an ISO text. What is compared with a missing value is missing.

    Args:
        owner: argument that it came by, for messages.
        rule: see `Rule`.

    Raises:
        ConfigError: the rule is no expression of this grammar.
    """

    owner: str
    rule: Rule

    def __post_init__(self) -> None:
        for node in ast.walk(self._tree()) if isinstance(self.rule, str) else ():
            if not isinstance(node, _NODES):
                raise self._invalid(f"{type(node).__name__} is not supported")
            if isinstance(node, ast.Call) and not _is_column(node):
                raise self._invalid("the only call is column(name)")
        if callable(self.rule) and not self.columns:
            raise ConfigError(f"{self.owner}: the function has no parameters; name them as columns.", field=self.owner)

    def __str__(self) -> str:
        return repr(self.rule) if isinstance(self.rule, str) else f"function of {', '.join(self.columns)}"

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that it needs, in order of appearance."""
        if callable(self.rule):
            return tuple(inspect.signature(self.rule).parameters)
        calls = {id(node.func): node.args[0].value for node in ast.walk(self._tree()) if _is_column(node)}  # type: ignore[attr-defined]
        nodes = [node for node in ast.walk(self._tree()) if isinstance(node, ast.Name)]
        return tuple(dict.fromkeys(calls.get(id(node), node.id) for node in nodes))

    def evaluate(self, columns: Mapping[str, Any]) -> Any:
        """The value for each row.

        Args:
            columns: pyarrow array `[n]` by name.

        Returns:
            A pyarrow array of booleans or numbers `[n]`, with nulls where what it needs is missing.

        Raises:
            DataError: types do not fit; names the rule.
        """
        import pyarrow as pa

        try:
            if callable(self.rule):
                result = self.rule(*(columns[name] for name in self.columns))
                return result if isinstance(result, (pa.Array, pa.ChunkedArray)) else pa.array(result)
            result = _evaluate(self._tree().body, columns)
            rows = len(next(iter(columns.values())))
            return result if isinstance(result, (pa.Array, pa.ChunkedArray)) else pa.repeat(result, rows)
        except PersiaError as error:
            raise DataError(f"{self.owner} = {self}: {error.message}", **error.fields) from error
        except Exception as error:  # Whatever the function raises, or pyarrow.
            raise DataError(
                f"{self.owner} = {self} cannot be evaluated: {error}; correct it.", field=self.owner
            ) from error

    def _tree(self) -> ast.Expression:
        assert isinstance(self.rule, str)
        try:
            return ast.parse(self.rule.strip(), mode="eval")
        except (SyntaxError, ValueError) as error:
            raise self._invalid(str(error)) from error

    def _invalid(self, why: str) -> ConfigError:
        return ConfigError(f"{self.owner} = {self.rule!r}: {why}; an expression has {_GRAMMAR}.", field=self.owner)


_NODES = (
    ast.Expression, ast.BoolOp, ast.UnaryOp, ast.Compare, ast.BinOp, ast.Name, ast.Constant, ast.Tuple, ast.List,
    ast.Call, ast.Load, ast.And, ast.Or, ast.Not, ast.USub, ast.In, ast.NotIn, ast.Is, ast.IsNot,
    *_COMPARISONS, *_ARITHMETIC,
)  # fmt: skip


def _is_column(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "column"
        and not node.keywords
        and [type(arg) for arg in node.args] == [ast.Constant]
    )


def _evaluate(node: ast.AST, columns: Mapping[str, Any]) -> Any:
    import pyarrow.compute as pc

    match node:
        case ast.Constant(value=constant):
            return constant
        case ast.Name(id=name):
            return columns[name]
        case ast.Call(args=[ast.Constant(value=text)]):
            return columns[str(text)]
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return [_evaluate(element, columns) for element in elements]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return pc.invert(_truth(_evaluate(operand, columns)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return pc.negate(_numbers(_evaluate(operand, columns)))
        case ast.BoolOp(op=boolean, values=parts):
            combine = pc.and_kleene if isinstance(boolean, ast.And) else pc.or_kleene
            return functools.reduce(combine, [_truth(_evaluate(part, columns)) for part in parts])
        case ast.BinOp(left=left, op=operator, right=right):
            left_value, right_value = _numbers(_evaluate(left, columns)), _numbers(_evaluate(right, columns))
            if isinstance(operator, ast.Div):
                left_value = pc.cast(left_value, "double")
            return pc.call_function(_ARITHMETIC[type(operator)], [left_value, right_value])
        case ast.Compare(left=left, ops=operators, comparators=others):
            values = [_evaluate(part, columns) for part in (left, *others)]
            pairs = zip(operators, values, values[1:], strict=False)
            return functools.reduce(pc.and_kleene, [_compare(*pair) for pair in pairs])
    raise DataError(f"{ast.dump(node)} cannot be evaluated.")


def _compare(operator: ast.cmpop, one: Any, other: Any) -> Any:
    import pyarrow.compute as pc

    if isinstance(operator, (ast.Is, ast.IsNot)):
        if other is not None:
            raise DataError("only None follows `is`; write ==.")
        missing = pc.or_kleene(pc.is_null(one, nan_is_null=_is_float(one)), _is_empty(one))
        return missing if isinstance(operator, ast.Is) else pc.invert(missing)
    if isinstance(operator, (ast.In, ast.NotIn)):
        if not isinstance(other, list) or not other:
            raise DataError("a list of values follows `in`.")
        found = compare("equal", one, other[0])
        for value in other[1:]:
            found = pc.or_kleene(found, compare("equal", one, value))
        return found if isinstance(operator, ast.In) else pc.invert(found)
    return compare(_COMPARISONS[type(operator)], one, other)


def compare(function: str, one: Any, other: Any) -> Any:
    """Compares arrays, or an array and a constant, as `pyarrow.compute` does, after giving them one type."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def kind(value: Any) -> str:
        type_ = value.type if isinstance(value, (pa.Array, pa.ChunkedArray)) else pa.scalar(value).type
        if pa.types.is_dictionary(type_):
            type_ = type_.value_type
        if pa.types.is_temporal(type_):
            return "time"
        text = pa.types.is_large_string(type_) or pa.types.is_string(type_) or pa.types.is_large_binary(type_)
        return "text" if text or pa.types.is_binary(type_) else "number"

    kinds = [kind(one), kind(other)]
    if "number" in kinds and "time" in kinds:
        raise DataError("a time is compared with a number; write the time as an ISO text.")
    for value, kind_of_other in ((one, kinds[1]), (other, kinds[0])):
        if isinstance(value, str) and kind_of_other == "number":
            raise DataError(f"a column of numbers is compared with the text {value!r}; write a number.")
    if "number" in kinds:
        one, other = _numbers(one), _numbers(other)
    elif "time" in kinds:
        type_ = next(v.type for v, k in zip((one, other), kinds, strict=True) if k == "time")
        one, other = (
            _time(value, type_) if k == "text" else value for value, k in zip((one, other), kinds, strict=True)
        )
    else:
        one, other = _text(one), _text(other)
    return pc.call_function(function, [one, other])


def _numbers(value: Any) -> Any:
    """Texts as numbers; numbers as they are."""
    import pyarrow as pa

    if not isinstance(value, (pa.Array, pa.ChunkedArray)):
        if isinstance(value, str) or value is None:
            raise DataError(f"{value!r} is no number.")
        return pa.scalar(value)
    if pa.types.is_integer(value.type) or pa.types.is_floating(value.type):
        return value
    return pa.array(number_column("", value, fill=float("nan")), from_pandas=True)


def _text(value: Any) -> Any:
    import pyarrow as pa

    if not isinstance(value, (pa.Array, pa.ChunkedArray)):
        return pa.scalar(value, pa.string())
    if pa.types.is_dictionary(value.type):
        value = value.dictionary_decode() if isinstance(value, pa.Array) else value.combine_chunks().dictionary_decode()
    return value.cast(pa.string())


def _time(value: Any, type_: Any) -> Any:
    import pyarrow as pa

    if isinstance(value, str):
        return pa.scalar(value).cast(type_)
    return _text(value).cast(type_)


def _truth(value: Any) -> Any:
    """Booleans as they are; numbers and texts of booleans as booleans."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not isinstance(value, (pa.Array, pa.ChunkedArray)):
        return pa.scalar(bool(value))
    return value if pa.types.is_boolean(value.type) else pc.not_equal(_numbers(value), 0)


def _is_float(value: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_floating(value.type))


def _is_empty(value: Any) -> Any:
    """Whether a text is empty, which is a missing value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = value.type
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return pc.equal(pc.binary_length(value), 0) if any(test(kind) for test in texts) else pa.scalar(False)
