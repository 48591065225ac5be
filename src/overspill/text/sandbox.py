# ruff: noqa: N802 - visitor methods carry the names of Jinja's nodes
"""The templates of model files, run as what they are: programs by strangers.

Jinja's immutable sandbox with the names and settings that Hugging Face's templates rely on, within a budget
(`budget`): loops, concatenations and literals are metered by rewriting the parsed template, calls and operators by the
environment, and what can make much out of little is checked first (`amplify`) or missing. Whatever goes wrong in a
template is a `UserError` with the template's own message.

What remains possible for a hostile template is to use up the budget at every request: seconds of one thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, filters, nodes, pass_eval_context
from jinja2.environment import Template
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from overspill.errors import UserError
from overspill.text.amplify import (
    METHODS,
    check_format,
    check_join,
    check_operands,
    check_replace,
    checked_arguments,
    spelled_out,
)
from overspill.text.budget import Limits, OverBudget, current, spending

MAX_SOURCE_CHARS = 1 << 20
MAX_INDENT = 16
DEFAULT_LIMITS = Limits()


class Program:
    """A compiled template. Safe to run from several threads at once."""

    def __init__(self, source: str, *, name: str, now: Callable[[], datetime]) -> None:
        """`name` stands in error messages; `now` is the time that `strftime_now` shows."""
        if len(source) > MAX_SOURCE_CHARS:
            raise UserError(f"{name} has {len(source)} characters; at most {MAX_SOURCE_CHARS} are run")
        self.source = source
        with _user_errors(f"{name} does not compile"), spending(DEFAULT_LIMITS):
            self._template = _Sandbox(now).compiled(source)

    def run(self, variables: Mapping[str, Any], limits: Limits = DEFAULT_LIMITS) -> str:
        """The text that the template writes, given `variables` of JSON-like types."""
        with _user_errors("chat template"), spending(limits):
            return "".join(self._template.generate(**variables))


@contextmanager
def _user_errors(what: str) -> Iterator[None]:
    """Everything that can go wrong in a template, as a `UserError`: a template is input."""
    try:
        yield
    except UserError:
        raise
    except TemplateSyntaxError as error:
        raise UserError(f"{what}: line {error.lineno}: {_one_line(error.message or 'syntax error')}") from None
    except (TemplateError, OverBudget) as error:
        raise UserError(f"{what}: {_one_line(str(error))}") from None
    except Exception as error:
        raise UserError(f"{what}: {type(error).__name__}: {_one_line(str(error))}") from None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]


class _Generation(Extension):
    """Hugging Face's `{% generation %}` around an assistant's text, which changes nothing in the prompt."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's way

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metered(NodeTransformer):
    """Puts loops, concatenations and literals under the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "each__", nodes.Const(_n_data_chars(node)))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "concat__")

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "made__") if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._weighed(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._weighed(node, node.items) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._weighed(node, [pair.value for pair in node.items])

    def _weighed(self, node: nodes.Expr, items: Sequence[nodes.Expr]) -> nodes.Node:
        self.generic_visit(node)
        return node if all(isinstance(item, nodes.Const) for item in items) else _filtered(node, "weighed__")


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _n_data_chars(node: nodes.Node) -> int:
    """Length of the literal text inside a node."""
    return sum(len(data.data) for data in node.find_all(nodes.TemplateData))


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, now: Callable[[], datetime]) -> None:
        loops = "jinja2.ext.loopcontrols"
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loops, _Generation], finalize=_written
        )
        self.filters = _filters()
        self.globals = {
            "range": _range,
            "dict": dict,
            "namespace": self.globals["namespace"],
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: _strftime(now(), format),
        }
        self._n_macro_chars = 0

    def compiled(self, source: str) -> Template:
        tree = self.parse(source)
        self._n_macro_chars = sum(map(_n_data_chars, tree.find_all(nodes.Macro)))
        code = self.compile(_Metered().visit(tree))
        return Template.from_code(self, code, self.make_globals(None))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(value, BuiltinMethodType):
            return attr in METHODS.get(type(obj), ())
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formats = super().wrap_str_format(value)
        if formats is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(value.__self__, "{", args, kwargs)
            return formats(*args, **kwargs)

        return checked

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = current()
        budget.step()
        if isinstance(obj, Macro):
            budget.write(self._n_macro_chars)
        elif isinstance(obj, BuiltinMethodType):
            args = checked_arguments(obj, args)
        return budget.made(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        current().step()
        check_operands(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _written(value: Any) -> Any:
    """Every value on its way out passes here."""
    budget = current()
    budget.write(len(value) if isinstance(value, str) else budget.weigh(value))
    return value


def _range(*args: int) -> range:
    items = range(*args)
    current().check_range(len(items))
    return items


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime(now: datetime, format: str) -> str:
    if len(format) > 200 or re.search(r"%\W*\d", format):
        raise OverBudget("formats a date to a given width")
    return now.strftime(format)


_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last", "length"),
    *("list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round", "select", "selectattr", "sort"),
    *("title", "trim", "unique", "upper"),
)


def _filters() -> dict[str, Callable[..., Any]]:
    """The filters that templates use, those that can amplify with a check in front; no HTML."""
    table = {name: filters.FILTERS[name] for name in _FILTERS}
    table |= {"safe": str, "join": _join, "replace": _replace, "indent": _indent}
    table |= {"tojson": _to_json, "from_json": json.loads, "concat__": spelled_out, "weighed__": _weighed}
    table |= {name: _on_weighed(filters.FILTERS[name]) for name in ("string", "sum", "groupby")}
    return {name: _charged(function) for name, function in table.items()} | {"each__": _each, "made__": _made}


def _charged(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter on a list in place of an iterator, its result charged."""

    @wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        budget = current()
        budget.step()
        args = tuple(budget.gathered(arg) if isinstance(arg, Iterator) else arg for arg in args)
        return budget.made(function(*args, **kwargs))

    return charged


def _on_weighed(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def on_weighed(*args: Any, **kwargs: Any) -> Any:
        current().weigh(*args)
        return function(*args, **kwargs)

    return on_weighed


def _each(items: Any, n_chars: int) -> Iterator[Any]:
    return current().each(items, n_chars)


def _made(value: Any) -> Any:
    return current().made(value)


def _weighed(value: Any) -> Any:
    current().weigh(value)
    return value


@pass_eval_context
def _join(context: nodes.EvalContext, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    items = current().gathered(value)
    check_join(str(d), items)
    return str(filters.FILTERS["join"](context, items, d, attribute))


@pass_eval_context
def _replace(context: nodes.EvalContext, s: str, old: str, new: str, count: int | None = None) -> str:
    check_replace(str(s), (old, new))
    return filters.do_replace(context, str(s), old, new, count)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    n_width = width if isinstance(width, int) else len(width)
    current().make(len(s) + n_width * (s.count("\n") + 1))
    return filters.do_indent(s, width, first, blank)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates expect it: no HTML escapes."""
    budget = current()
    budget.weigh(value)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    if not isinstance(indent, int) or indent > MAX_INDENT:
        raise OverBudget(f"indents JSON by more than {MAX_INDENT} spaces")
    parts: list[str] = []
    for part in encoder.iterencode(value):
        budget.step()
        budget.make(len(part))
        parts.append(part)
    return "".join(parts)
