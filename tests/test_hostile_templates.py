"""Chat templates are programs from a model's file: a wrong, hostile or endless one ends in one line, soon."""

from __future__ import annotations

import resource
import threading
import time

import pytest

from xsake.model.text import chat_template
from xsake.model.text.chat_template import render

MESSAGES = [{"role": "user", "content": "Hi"}]
NESTED = "{% for a in range(99999) %}" * 6 + "x" + "{% endfor %}" * 6
TOO_LONG = "ran for more than .* s and was stopped"
TOO_LARGE = f"needs more memory than it may have|{TOO_LONG}"  # filling memory takes time, too
TOO_MUCH = "makes a text of .* characters of this conversation, more than the .* allowed"

CASES = {
    "nested loops": (NESTED, TOO_LONG),
    "nested loops without text": (NESTED.replace("x", ""), TOO_LONG),
    "exponential macro": (
        "{% macro f(n) %}{{ f(n-1) }}{{ f(n-1) }}{% endmacro %}{{ f(99) }}",
        f"{TOO_LONG}|too deeply",
    ),
    "endless macro": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself too deeply"),
    "power": ("{{ 10**(10**9) }}", TOO_LARGE),
    "number as text": ("{{ 10**(10**5) }}", "cannot be rendered: ValueError: Exceeds the limit"),
    "center": ("{{ 'x'.center(10**12) }}", f"{TOO_LARGE}|cannot be rendered: OverflowError"),
    "center of a gigabyte": ("{{ 'x'.center(2**30) }}", TOO_LARGE),
    "center filter, folded while compiling": ("{{ 'x'|center(2**30) }}", TOO_LARGE),
    "many megabytes": ("{{ 'x'.center(2**21) }}", TOO_MUCH),
    "product": ("{{ 'x' * 2**33 }}", TOO_LARGE),
    "list product": ("{{ ([1] * 2**33)|length }}", TOO_LARGE),
    "format": ("{{ '%10000000000d' % 1 }}", f"{TOO_LARGE}|cannot be rendered"),
    "format method": ("{{ '{:>10000000000}'.format(1) }}", f"{TOO_LARGE}|cannot be rendered"),
    "join": ("{{ range(99999)|join('y' * 99999) }}", TOO_LARGE),
    "replace": ("{{ ('x' * 99999).replace('x', 'y' * 99999) }}", TOO_LARGE),
    "doubling": (
        "{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        TOO_LARGE,
    ),
    "indent": ("{{ ('x\n' * 9999)|indent(99999) }}", TOO_LARGE),
    "lipsum": ("{{ lipsum(n=10**7) }}", TOO_LARGE),
    "long range": ("{% for i in range(10**9) %}{% endfor %}", "cannot be rendered: OverflowError: Range too big"),
    "deep parentheses": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested or calls itself too deeply"),
    "deep blocks": ("{% if 1 %}" * 500 + "{% endif %}" * 500, "cannot be rendered|too deeply"),
    "syntax": ("{% for %}", "cannot be rendered: TemplateSyntaxError"),
    "unknown tag": ("{% exec 'x' %}", "cannot be rendered: TemplateSyntaxError"),
    "unknown filter": ("{{ 1|nothing }}", "cannot be rendered: TemplateAssertionError"),
    "unknown name": ("{{ a.b.c }}", "cannot be rendered: UndefinedError"),
    "wrong types": ("{{ messages + 1 }}", "cannot be rendered: TypeError"),
    "division by zero": ("{{ 1 // 0 }}", "cannot be rendered: ZeroDivisionError"),
    "other files": ("{% include '/etc/passwd' %}", "cannot be rendered"),
    "Python": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__'.* is unsafe"),
    "changes its input": ("{{ messages.append(1) }}", "access to attribute 'append' .* is unsafe"),
    "refusal": ("{{ raise_exception('roles must\n alternate') }}", "refuses these messages: roles must alternate"),
}


@pytest.mark.parametrize("name", CASES)
def test_hostile_templates_end_in_one_line(name, monkeypatch):
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 0.3)
    template, message = CASES[name]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(ValueError, match=f"the model's chat template .*({message})") as caught:
        render(template, messages=MESSAGES)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "\n" not in str(caught.value)
    spent = sum(getattr(after, kind) - getattr(before, kind) for kind in ("ru_utime", "ru_stime"))
    assert spent < 1  # memory has a limit of its own in the child: "center of a gigabyte" runs into it


def test_in_a_thread_too(monkeypatch):
    """In a thread, signals cannot be used; other threads go on meanwhile."""
    monkeypatch.setattr(chat_template, "CPU_SECONDS", 0.5)
    said: list[str] = []

    def run() -> None:
        with pytest.raises(ValueError, match=TOO_LONG) as caught:
            render(NESTED)
        said.append(str(caught.value))

    thread = threading.Thread(target=run)
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.01)
        turns += 1
    assert said and turns > 20


def test_a_long_conversation_is_rendered_whole():
    """A conversation of a million tokens; a template may repeat it, and add text of its own."""
    messages = [{"role": "user", "content": "na\u00efve \U0001f642 " * 400_000}]
    text = render("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", messages=messages)
    assert text == messages[0]["content"] * 2
    assert len(render("{{ 'x' * 99999 }}")) == 99999
