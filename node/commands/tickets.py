"""The command `murmur ticket`. Heavy modules are imported inside."""

from pathlib import Path
from typing import Annotated

import typer


def ticket(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="as for `murmur join`, or the directory of one of its nodes")
    ],
    holder: Annotated[
        str, typer.Argument(metavar="[KEY]", help="the peer id that `murmur key` or `murmur join` shows")
    ] = "",
    until: Annotated[str, typer.Option(help="end of the ticket: a span such as 30d or 12h, or a date")] = "30d",
    note: Annotated[str, typer.Option(help="a word for yourself, such as the holder's name")] = "",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="write the ticket to a file")] = None,
    revoke: Annotated[bool, typer.Option("--revoke", help="take the key out of the run")] = False,
    key: Annotated[
        Path | None, typer.Option(help="the organiser's key (default: ~/.local/state/murmur/organiser.key)")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="also accept plain http:// over the internet")] = False,
) -> None:
    """Let a key take part in a run of tickets as its organiser; without a KEY, list the tickets so far."""
    from node.daemon.steering.tickets import TicketOptions, run_tickets

    run_tickets(
        TicketOptions(
            run=run, holder=holder, until=until, note=note, out=out, revoke=revoke, key=key, insecure=insecure
        )
    )


COMMANDS = ((ticket, "Example: murmur ticket run.toml 12D3KooW... --until 30d --note mary"),)
