"""The forms in which models write calls of tools, and which one a chat template asks for.

A form is found by the marks that its template has. Reading one is strict: text that is not exactly of the form is no
call, and the reader shows it as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from overspill.server import reading_json as json_forms
from overspill.server import reading_xml as xml_forms
from overspill.server.reading import Called, Schemas

ReadCalls = Callable[[str, Schemas], list[Called] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallForm:
    """How calls are written.

    signs: what a template of this form has, all of them. openings: marks that begin calls, with the mark that ends
    them; None: only the answer's end does. read: the calls in a text from opening to closing, None if it is not of the
    form. marks: tokens within. is_first: calls stand before anything else that is said, or nowhere.
    """

    name: str
    signs: Sequence[str]
    openings: Mapping[str, str | None]
    read: ReadCalls
    marks: Sequence[str] = ()
    is_first: bool = False

    @property
    def all_marks(self) -> list[str]:
        """Every mark that may be a token of its own."""
        return [*self.openings, *(mark for mark in self.openings.values() if mark), *self.marks]


DSML = "｜DSML｜"
_FORMS = (
    CallForm(
        name="minimax",
        signs=["<minimax:tool_call>"],
        openings={"<minimax:tool_call>": "</minimax:tool_call>"},
        read=xml_forms.invoked,
    ),
    CallForm(
        name="dsml",
        signs=[DSML, "invoke"],
        openings={f"<{DSML}{block}>": f"</{DSML}{block}>" for block in ("function_calls", "tool_calls")},
        read=xml_forms.invoked,
        marks=[DSML],
    ),
    CallForm(
        name="deepseek",
        signs=["<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"],
        openings={"<｜tool▁calls▁begin｜>": "<｜tool▁calls▁end｜>"},
        read=json_forms.separated,
        marks=["<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"],
    ),
    CallForm(
        name="kimi",
        signs=["<|tool_calls_section_begin|>"],
        openings={"<|tool_calls_section_begin|>": "<|tool_calls_section_end|>"},
        read=json_forms.sectioned,
        marks=["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"],
    ),
    CallForm(
        name="mistral",
        signs=["[TOOL_CALLS]"],
        openings={"[TOOL_CALLS]": None},
        read=json_forms.listed,
        marks=["[CALL_ID]", "[ARGS]"],
    ),
    CallForm(
        name="qwen-coder",
        signs=["<function=", "<parameter="],
        openings={"<tool_call>": "</tool_call>", "<function=": "</function>"},
        read=xml_forms.assigned,
    ),
    CallForm(
        name="glm",
        signs=["<tool_call>", "<arg_key>", "<arg_value>"],
        openings={"<tool_call>": "</tool_call>"},
        read=xml_forms.paired,
        marks=["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    ),
    CallForm(
        name="hermes",
        signs=["<tool_call>", "arguments"],
        openings={"<tool_call>": "</tool_call>"},
        read=json_forms.tagged,
    ),
    CallForm(
        name="lfm",
        signs=["<|tool_list_start|>"],
        openings={"<|tool_call_start|>": "<|tool_call_end|>"},
        read=json_forms.pythonic,
    ),
    CallForm(
        name="llama",
        signs=["<|start_header_id|>", "tools", '"parameters"'],
        openings={"<|python_tag|>": None, "{": None},
        read=json_forms.bare,
        marks=["<|eom_id|>"],
        is_first=True,
    ),
)


def call_form(template: str) -> CallForm | None:
    """The form of calls that a template's model writes; None if the template knows of no calls."""
    return next((form for form in _FORMS if all(sign in template for sign in form.signs)), None)
