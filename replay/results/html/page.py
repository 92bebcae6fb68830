"""The parts of a page. Everything that comes from a trace, a deployment or a peer is escaped here and only here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import NamedTuple

from tensorferry.replay.results.html.charts import HEIGHT, Draw, svg


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def text(value: object) -> Html:
    """Markup that shows a value as it is."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def document(title: str, *parts: Html) -> bytes:
    """A page in one file: its style is inside, it runs no script, and it loads nothing."""
    style = files("tensorferry.replay.results.html").joinpath("style.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            f"<title>{text(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
            *parts,
            "</body>\n</html>\n",
        )
    ).encode()


def header(title: str, lead: str, alarms: Iterable[str] = ()) -> Html:
    boxes = "".join(f'<div class="alarm" role="alert">{text(alarm)}</div>' for alarm in alarms)
    return Html(f'<header><h1>{text(title)}</h1><p class="lead">{text(lead)}</p>{boxes}</header>')


def section(heading: str, *parts: Html) -> Html:
    return Html(f"<section><h2>{text(heading)}</h2>{''.join(parts)}</section>")


def tiles(values: Iterable[tuple[str, str]]) -> Html:
    """The few numbers to look at first: (what, value)."""
    shown = (f'<div class="tile"><b>{text(value)}</b><span>{text(what)}</span></div>' for what, value in values)
    return Html(f'<div class="tiles">{"".join(shown)}</div>')


def plot(name: str, caption: str, explained: str, draw: Draw, *, height: float = HEIGHT) -> Html:
    """A figure; `name` as for `charts.svg`. Raises ReportError without matplotlib."""
    said = f"<figcaption>{text(caption)}<span>{text(explained)}</span></figcaption>"
    return Html(f"<figure>{said}{svg(name, draw, height=height)}</figure>")


def plots(*figures: Html) -> Html:
    return Html(f'<div class="plots">{"".join(figures)}</div>')


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, said: Sequence[int] = (), caption: str = ""
) -> Html:
    """said: the columns that hold sentences rather than numbers. A cell may be `Marked`.

    On a telephone each row of a table of more than five columns is a block, headed by its first cell, and its other
    cells name their columns.
    """
    wide = len(head) > 5

    def cell(tag: str, column: int, value: object) -> str:
        kind = "said" if column in said else ""
        if isinstance(value, Marked):
            value, kind = value
        named = f' class="{kind}"' if kind else ""
        if wide and tag == "td" and column and head[column]:
            named += f' data-head="{text(head[column])}"'
        return f"<{tag}{named}>{text(value)}</{tag}>"

    def line(tag: str, values: Sequence[object]) -> str:
        return f"<tr>{''.join(cell(tag, column, value) for column, value in enumerate(values))}</tr>"

    body = "".join(line("td", values) for values in rows)
    opened = '<table class="wide">' if wide else "<table>"
    named = f"<caption>{text(caption)}</caption>" if caption else ""
    return Html(
        f'<div class="scroll">{opened}{named}<thead>{line("th", head)}</thead><tbody>{body}</tbody></table></div>'
    )


class Marked(NamedTuple):
    """A cell that is `better` or `worse` than another."""

    value: str
    kind: str


def facts(values: Iterable[tuple[str, object]]) -> Html:
    """Names and what they are."""
    return Html(f"<dl>{''.join(f'<dt>{text(name)}</dt><dd>{text(value)}</dd>' for name, value in values)}</dl>")


def code(value: str) -> Html:
    return Html(f"<code>{text(value)}</code>")


def folded(heading: str, value: str) -> Html:
    """Long text that is shown when asked for."""
    return Html(f"<details><summary>{text(heading)}</summary><pre>{text(value)}</pre></details>")


def note(value: str) -> Html:
    return Html(f'<p class="note">{text(value)}</p>')
