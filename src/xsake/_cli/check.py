"""`xsake check`: hold a backend to the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from xsake._cli.errors import plain_errors
from xsake._cli.options import duration

if TYPE_CHECKING:
    from xsake.testing.checks import Check
    from xsake.testing.runner import Checklist
    from xsake.testing.verdict import Verdict


def check(
    backend: Annotated[
        str, typer.Argument(help="An implementation's name, or the path of a module, such as kernel.py.")
    ],
    quick: Annotated[bool, typer.Option(help="A check of each kind, in about a minute.")] = False,
    only: Annotated[
        str, typer.Option(help="Parts or groups, separated by commas: forward, gradients, masks, rules, padding, ...")
    ] = "",
    limit: Annotated[
        str,
        typer.Option(
            help="Time after which a check counts as hanging; one that interprets a kernel or compiles much gets more."
        ),
    ] = "60s",
) -> None:
    """Hold a backend to the contract: values and gradients beside float64, for every argument that it claims."""
    console = Console()
    with plain_errors("test"):
        from xsake._measure.isolation import Failed, Worker, reason
        from xsake._op import registry
        from xsake.testing.runner import Checkers, checklist

        name = registry.name_of(backend)
        registry.check_name(name)
        checkers = Checkers(name, quick=quick, limit=duration(limit), start=Worker)
        try:
            planned = checklist(checkers.target(), quick=quick, only=only.split(",") if only else [])
            console.print(_heading(planned))
            with console.status("") as status:
                verdicts = {}
                for done, verdict in checkers.run(planned):
                    verdicts[done] = verdict
                    status.update(f"{len(verdicts)} of {len(planned.checks)} checks")
        except Failed as failed:
            raise ValueError(reason(failed)) from failed
        finally:
            checkers.close()
    console.print(_table(planned, verdicts))
    _tell_findings(console, verdicts)
    wrong = sum(not verdict.holds for verdict in verdicts.values())
    refused = sum(verdict.refused is not None for verdict in verdicts.values())
    not_here = sum(verdict.not_here is not None for verdict in verdicts.values())
    holds = len(verdicts) - wrong - refused - not_here
    alone = sum(verdict.no_gradients is not None for verdict in verdicts.values())
    told = f"{holds} of {len(verdicts)} checks hold{f' ({alone} without gradients)' if alone else ''}"
    missing = f", {not_here} cannot run on this machine" if not_here else ""
    console.print(f"{name}: {told}, {wrong} fail, {refused} were refused by name{missing}")
    raise typer.Exit(int(wrong > 0 or holds == 0))


def _heading(planned: Checklist) -> str:
    target = planned.target
    how = ", interpreted" if target.interpret else ""
    return (
        f"[bold]{target.name}[/bold]{how}: {', '.join(target.dtypes)}; blocks of {target.size(16)} and "
        f"{target.size(32)} tokens, head_dim {target.head_dim}, values of {target.value_dim}"
    )


def _table(planned: Checklist, verdicts: dict[Check, Verdict]) -> Table:
    parts = [part for part in ("forward", "gradients") if part in planned.parts]
    table = Table("check", *parts, "")
    for check, verdict in verdicts.items():
        if verdict.not_run is not None:
            table.add_row(escape(check.title), *("–" for _ in parts), escape(verdict.not_run))
            continue
        found = [getattr(verdict, part) for part in parts]
        marks = ["[green]holds[/green]" if problem is None else "[red]FAILS[/red]" for problem in found]
        if verdict.no_gradients is not None or (verdict.ended and verdict.forward is not None and len(parts) == 2):
            marks[-1] = "–"
        said = _short(next(filter(None, found), "")) or verdict.no_gradients or ""
        table.add_row(escape(check.title), *marks, escape(said))
    return table


def _short(problem: str) -> str:
    return problem.partition(", RMS")[0]


def _tell_findings(console: Console, verdicts: dict[Check, Verdict]) -> None:
    """Each fault once, with the call that shows it and what the first of its checks found.

    Checks have a fault in common if one call shows it, or, where the kernel hangs or ends the process, if it is told in
    the same words.
    """
    faults: dict[tuple[str | None, ...], list[Check]] = {}
    for check, verdict in verdicts.items():
        if not verdict.holds:
            lost = not verdict.results and not verdict.ended
            faults.setdefault((verdict.forward, verdict.gradients) if lost else (verdict.code,), []).append(check)
    for found in faults.values():
        code = verdicts[found[0]].code
        first, others = verdicts[found[0]], f" and {len(found) - 1} more" if len(found) > 1 else ""
        console.print(f"\n[red]{escape(found[0].title)}[/red]{others}")
        for line in dict.fromkeys(filter(None, (first.forward, first.gradients, first.at))):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(f"\n{code}", markup=False, highlight=False, soft_wrap=True)
    if faults:
        console.print()
