"""Templates by strangers: what they may do, and that they fail within seconds and megabytes (B30)."""

from __future__ import annotations

import threading
import time
import tracemalloc
from contextlib import suppress
from datetime import datetime

import pytest

from overspill.errors import UserError
from overspill.text.budget import Limits
from overspill.text.sandbox import Program

NOON = datetime(2025, 7, 26, 12, 0)
MESSAGES = [{"role": "user", "content": "hello"}]


def program(source: str) -> Program:
    return Program(source, name="template", now=lambda: NOON)


def run(source: str, limits: Limits | None = None, **variables: object) -> str:
    given = {"messages": MESSAGES} | variables
    return program(source).run(given, limits) if limits else program(source).run(given)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ m.role }}:{{ m['content'] }}{% endfor %}", "user:hello"),
        ("  {% if true %}\nx\n  {% endif %}\ny\n", "x\ny"),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i > 2 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "02"),
        ("{% for x in [3, 4] %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}", "1/2,2/2"),
        ("{% for x in [1, 2, 3] if x != 2 %}{{ x }}{{ loop.previtem }}{% else %}none{% endfor %}", "131"),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        ("{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{% endfor %}", "a1b2"),
        ("{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ k }}{% endfor %}", "ab"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{{ 'a' ~ 1 ~ none ~ [2] }}", "a1None[2]"),
        ("{{ ('a', 'b') | join('-') }}{{ ['x', 'y'] | map('upper') | join }}", "a-bXY"),
        ("{{ {'k': 'é<>&\"', 'n': [1, true, none]} | tojson }}", '{"k": "é<>&\\"", "n": [1, true, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}{{ 'é' | tojson(ensure_ascii=true) }}", '[1,2]"\\u00e9"'),
        ("{{ ('{\"a\": [1]}' | from_json).a[0] }}", "1"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro twice(x) %}{{ x }}{{ x }}{% endmacro %}{{ twice('ab') | trim }}", "abab"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{{ undefined_name }}", "a1"),
        ("{{ '%s-%02d' % ('a', 3) }} {{ '{}={:>3}'.format('k', 'v') }}", "a-03 k=  v"),
        ("{{ 'ab' * 2 + 'c' }}{{ 2 ** 3 }}{{ 7 % 3 }}", "ababc81"),
        ("{{ 'a-b'.split('-')[-1] }}{{ ' x '.strip() }}{{ 'abc'.replace('b', 'd') }}{{ '-'.join(['p', 'q']) }}",
         "bxadcp-q"),
        ("{% set ids = [] %}{% set _ = ids.append('x') %}{{ ids.pop(0) }}{{ ids | length }}", "x0"),
        ("{{ 'a\nb' | indent(2) }}|{{ 'x' | safe }}|{{ ' y ' | trim | upper }}", "a\n  b|x|Y"),
        ("{% generation %}{{ 'reply' }}{% endgeneration %}!", "reply!"),
        ("{{ strftime_now('%d %b %Y') }}", "26 Jul 2025"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages[::-1][0].content }}{{ messages | map(attribute='role') | first }}", "hellouser"),
        ("{{ 'b' in ['a', 'b'] }}{{ (1, 2)[0] }}{% set a, b = 3, 4 %}{{ a }}{{ b }}", "True134"),
        ("{{ dict(a=1).a }}{{ [3, 1, 2] | sort | string }}{{ [1, 2] | sum }}{{ 'x' | default('y') }}", "1[1, 2, 3]3x"),
    ],
)  # fmt: skip
def test_what_templates_rely_on(source, text):
    assert run(source) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ [].__class__.__base__.__subclasses__() }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__.os }}",
        "{{ range.__self__.__class__ }}",
        "{{ namespace.__init__.__globals__.__builtins__ }}",
        "{{ (messages | map(attribute='__class__') | first).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{x.__class__}'.format_map({'x': 1}) }}",
        "{% set f = 'abc'.format %}{{ f.__globals__ }}",
        "{% for f in [strftime_now] %}{{ f.__code__ }}{% endfor %}",
        "{% macro m() %}{% endmacro %}{{ m.__globals__ }}{{ m._func }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages.sort() }}",
        "{{ messages[0].pop('role') }}",
        "{% include 'x' %}",
        "{% import 'x' as y %}",
        "{% extends 'x' %}",
        "{{ lipsum(n=1000000000) }}",
    ],
)
def test_nothing_outside_can_be_reached_or_changed(source):
    messages = [{"role": "user", "content": "hello"}]
    with suppress(UserError):
        assert run(source, messages=messages) == ""
    assert messages == MESSAGES


BOMBS = [
    "{% for i in range(1000000000) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "{% for i in 'x' * 16000000 %}{% for j in 'x' * 16000000 %}{% endfor %}{% endfor %}",
    "{{ 'x' * 2147483648 }}",
    "{{ 2147483648 * 'x' }}",
    "{{ ['x'] * 2147483648 }}",
    "{{ ('x',) * 99999999999 }}",
    "{{ 'x' * (10 ** 100) }}",
    "{{ 9 ** 99999999999 }}",
    "{% set ns = namespace(n=10) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% set ns.s = x %}{% endfor %}",
    "{% set ns = namespace(s=['x']) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=['x']) %}{% for i in range(99) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s={}) %}{% for i in range(99) %}{% set ns.s = {'a': ns.s, 'b': ns.s} %}{% endfor %}"
    "{{ ns.s == ns.s.a }}",
    "{% set ns = namespace(s=[]) %}{% for i in range(99) %}{% set t = [] %}{% set _ = t.append(ns.s) %}"
    "{% set _ = t.append(ns.s) %}{% set ns.s = t %}{% endfor %}{{ ns.s | string }}",
    "{% set l = [] %}{% set _ = l.append(l) %}{{ l | tojson }}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m(n) %}{% if n < 60 %}{{ m(n + 1) }}{{ m(n + 1) }}{% endif %}{% endmacro %}{{ m(0) }}",
    "{% macro m(n) %}xxxxxxxxxxxxxxxxxxxxxxxx{% if n < 60 %}{{ m(n + 1) }}{{ m(n + 1) }}{% endif %}{% endmacro %}"
    "{{ m(0) }}",
    "{{ '%2147483647d' % 1 }}",
    "{{ '%*d' % (2147483647, 1) }}",
    "{{ '{:>2147483647}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=2147483647) }}",
    "{% set s = 'x' * 9999999 %}{{ '%s%s%s%s%s%s%s%s' % (s, s, s, s, s, s, s, s) }}",
    "{% set s = 'x' * 9999999 %}{{ s.replace('x', s) }}",
    "{% set s = 'x' * 9999999 %}{{ s | replace('x', s) }}",
    "{% set s = 'x' * 9999999 %}{{ s.join(s) }}",
    "{% set s = 'x' * 9999999 %}{{ [1, 2, 3, 4, 5] | join(s) }}",
    "{% set s = 'x' * 9999999 %}{{ [s, s, s] | string }}",
    "{% set s = 'x' * 9999999 %}{{ [s, s, s] | tojson }}",
    "{% set s = '\n' * 9999999 %}{{ s | indent(1000000) }}",
    "{{ [1, 2] | tojson(indent=1000000000) }}",
    "{{ 'x'.ljust(2147483648) }}",
    "{{ 'x'.center(2147483648) }}",
    "{{ 'x'.zfill(2147483648) }}",
    "{{ '\t'.expandtabs(2147483648) }}",
    "{{ (1).to_bytes(2147483648, 'big') }}",
    "{{ 'x' | center(2147483648) }}",
    "{{ strftime_now('%2147483647d') }}",
    "{{ range(99999) | map('string') | map('replace', '', 'x' * 9999) | list | length }}",
    "{% for a in range(2000) %}{% for b in range(2000) %}{% for c in range(2000) %}{{ c }}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "{% set s = 'x' * 999999 %}{% for i in range(99) %}{% if s[1:] %}{% endif %}{% endfor %}",
    "{{ ((" * 5000 + "1" + "))" * 5000 + " }}",
    "{% if true %}" * 500 + "{% endif %}" * 500,
]  # fmt: skip


@pytest.mark.parametrize("source", BOMBS, ids=range(len(BOMBS)))
def test_bombs_go_off_within_seconds_and_megabytes(source):
    tracemalloc.start()
    started = time.thread_time()
    try:
        with pytest.raises(UserError) as caught:
            run(source, Limits(n_steps=20_000, n_chars=1 << 20, n_made=1 << 24, n_written=1 << 22, seconds=20))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.thread_time() - started < 20
    assert peak_bytes < 100 << 20
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_each_limit_is_named():
    loop = "{% for i in range(1000) %}xxxx{% endfor %}"
    assert len(run(loop)) == 4000
    for limits, words in [
        (Limits(n_steps=999), "takes more than 999 steps"),
        (Limits(n_written=3999), "writes more than 3999 characters"),
        (Limits(n_range=999), "asks for a range of more than 999 items"),
        (Limits(seconds=0), "takes more than 0 s"),
    ]:
        with pytest.raises(UserError, match=words):
            run(loop, limits)
    with pytest.raises(UserError, match="makes a value of more than 10 characters"):
        run("{{ 'abcdef' + 'abcdef' }}", Limits(n_chars=10))


def test_a_long_source_is_refused():
    with pytest.raises(UserError, match="template has 1048577 characters; at most 1048576 are run"):
        program("x" * ((1 << 20) + 1))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles\nmust alternate') }}", "chat template: Roles must alternate"),
        ("{{ messages.nothing.at_all }}", "chat template: 'list object' has no attribute 'nothing'"),
        ("{{ 1 + 'a' }}", "chat template: TypeError: unsupported operand"),
        ("{{ 1 // 0 }}", "chat template: ZeroDivisionError"),
        ("{{ '{' | from_json }}", "chat template: JSONDecodeError"),
        ("{{ undefined_name() }}", "chat template: 'undefined_name' is undefined"),
        ("x\n{% if %}", "template does not compile: line 2: "),
        ("{{ 'x' | no_such_filter }}", "template does not compile: line 1: No filter named 'no_such_filter'."),
        ("{% no_such_tag %}", "template does not compile: line 1: Encountered unknown tag 'no_such_tag'."),
    ],
)
def test_failures_carry_the_templates_own_words(source, message):
    with pytest.raises(UserError) as caught:
        run(source)
    assert str(caught.value).startswith(message)


def test_two_threads_have_budgets_of_their_own():
    shared = program("{% for i in range(n) %}x{% endfor %}")
    outcomes: dict[int, str] = {}

    def render(n: int, limits: Limits) -> None:
        try:
            outcomes[n] = shared.run({"n": n}, limits)
        except UserError as error:
            outcomes[n] = str(error)

    threads = [threading.Thread(target=render, args=(n, Limits(n_steps=5000))) for n in (4000, 6000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {4000: "x" * 4000, 6000: "chat template: takes more than 5000 steps"}
