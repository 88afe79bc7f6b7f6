import io

from rich.console import Console

from node.commands.up.swarm_summary import (
    COLUMNS,
    PeerSummary,
    SwarmDisplay,
    SwarmSummary,
    build_table,
    format_cells,
    format_header,
    format_plain_line,
)
from node.monitoring.status import NodeStatus

STATUS = NodeStatus(
    peer_id="p",
    run="demo",
    run_id="0",
    phase="training",
    round=12,
    step=240,
    loss=2.3456,
    tokens_per_second=4500,
    contributions_included=11,
    contributions_excluded=1,
    digest="ab12cd34" * 8,
)
PEERS = (
    PeerSummary("peer-0", "running", STATUS, bytes_sent=4_200_000),
    PeerSummary("peer-1", "lost", STATUS, bytes_sent=3_000_000),
    PeerSummary("peer-2", "starting", None),
)


def view(elapsed: float = 31.0, rounds: int | None = 30) -> SwarmSummary:
    return SwarmSummary("demo", rounds, None, elapsed, PEERS)


def display(terminal: bool, plain: bool = False) -> tuple[SwarmDisplay, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, highlight=False)
    return SwarmDisplay(console, plain), out


def test_cells_of_every_state() -> None:
    rows = [[cell.plain for cell in format_cells(peer)] for peer in PEERS]
    assert rows[0] == ["peer-0", "training", "12", "240", "2.346", "4.5k", "4.2 MB", "11/12", "ab12cd34"]
    assert rows[1][:2] == ["peer-1", "lost"]
    assert rows[2] == ["peer-2", "starting", *["-"] * 7]
    assert all(len(row) == len(COLUMNS) for row in rows)


def test_table_fits_80_columns() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(build_table(view()))
    assert "ab12cd34" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_header_and_plain_line() -> None:
    assert format_header(view(), 75.0) == "demo · 1 of 3 peers · round 12 of 30 · 0:31 · time left 1:15"
    expected = (
        "round 12 of 30 · 0:31 · time left - · loss 2.346 · 4.5k tok/s · sent 7.2 MB · "
        "peer-0 training, peer-1 lost, peer-2 starting"
    )
    assert format_plain_line(view(), None) == expected
    assert format_plain_line(view(rounds=None), None).startswith("round 12 · 0:31")


def test_plain_line_every_few_seconds_without_a_terminal() -> None:
    shown, out = display(terminal=False)
    with shown:
        for tenth in range(120):
            shown.show(view(elapsed=tenth / 10))
        shown.print_line("drill: [peer-2] is killed")
    lines = out.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[-1] == "drill: [peer-2] is killed"  # brackets are text, not markup
    assert "\x1b" not in out.getvalue()


def test_table_is_redrawn_in_place_and_lines_stay_on_a_terminal() -> None:
    shown, out = display(terminal=True)
    with shown:
        shown.show(view())
        shown.print_line("something happened")
        shown.show(view(elapsed=32.0))
    assert "\x1b[" in out.getvalue()
    assert "something happened" in out.getvalue()
    assert "0:32" in out.getvalue()


def test_plain_forces_lines_on_a_terminal() -> None:
    shown, out = display(terminal=True, plain=True)
    with shown:
        shown.show(view())
    assert "\x1b[1A" not in out.getvalue()
    assert "round 12 of 30" in out.getvalue()
