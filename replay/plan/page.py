"""The page of a plan, which shows fallbacks by budget."""

from __future__ import annotations

from collections.abc import Sequence

from tensorferry.replay.plan.forecast import Plan
from tensorferry.replay.results.html import charts, page


def report(plan: Plan, title: str, answers: Sequence[str]) -> bytes:
    """Make the page. answers: the sentences that the terminal shows. Raises ReportError without matplotlib."""
    budgets = [found.budget_mb for found in plan.curve]
    shares = [100 * found.share for found in plan.curve]
    lines = {"under 1 %": plan.under_1_percent_mb, "under 0.1 %": plan.under_01_percent_mb}
    marked = {name: budget_mb for name, budget_mb in lines.items() if budget_mb is not None}
    figure = page.plot(
        "curve",
        "Fallbacks by pool.budget_mb",
        "The share of the items that would go inline because the pool has no room.",
        charts.curve(budgets, shares, "MiB", "% of items", marked),
    )
    rows = [[found.budget_mb, found.fallbacks, found.items, f"{found.share:.2%}"] for found in plan.curve]
    table = page.Table(("pool.budget_mb", "fallbacks", "of items", ""), rows)
    return page.document("plan.html", title, " ".join(answers), figures=[figure], budgets=table)
