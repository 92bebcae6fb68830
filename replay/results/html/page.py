"""The figures and tables that the page templates show. jinja2 escapes all text, in the templates only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from tensorferry.replay.results.html.charts import HEIGHT, Draw, svg

_PACKAGE = "tensorferry.replay.results.html"
_TEMPLATES = Environment(
    loader=PackageLoader(_PACKAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


class Figure(NamedTuple):
    caption: str
    explained: str
    svg: str  #: markup


class Marked(NamedTuple):
    """A cell that is `better` or `worse` than another."""

    value: str
    kind: str

    def __str__(self) -> str:
        return self.value


class Table(NamedTuple):
    """A table. said: the columns that hold sentences instead of numbers. A cell may be `Marked`."""

    head: Sequence[str]
    rows: Iterable[Sequence[object]]
    said: Sequence[int] = ()
    caption: str = ""


def plot(name: str, caption: str, explained: str, draw: Draw, *, height: float = HEIGHT) -> Figure:
    """Draw a figure; `name` as for `charts.svg`. Raises ReportError without matplotlib."""
    return Figure(caption, explained, svg(name, draw, height=height))


def document(template: str, title: str, lead: str, alarms: Iterable[str] = (), **parts: object) -> bytes:
    """Render a page as one file. Its style is inside, it runs no script, and it loads nothing.

    template: one of those in `templates`, but not `page.html` or `parts.html`. parts: the template's variables.
    """
    style = files(_PACKAGE).joinpath("style.css").read_text(encoding="utf-8")
    page = _TEMPLATES.get_template(template)
    return page.render(title=title, lead=lead, alarms=alarms, style=style, **parts).encode()
