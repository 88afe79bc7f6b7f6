"""Measure goodput: the tokens that count, over those that the living could make, while peers die in every round.

    python benchmarks/goodput.py [--share 0.3 0.6] [--seconds 340] [--round 90] [--again] [--json]
    python benchmarks/goodput.py --draw

Eight real peers behind links of 20 to 100 Mbit/s, whose trainers play steps of 0.25 to 2 s (speeds 1:8) of a tiny
model (`benchmarks.played_card`) by the recipe `frugal`, each with as many steps as fit into a round
(`schedule.seconds`). In every round a share of them is killed, daemon and trainer, at moments that the seed draws, and
started again with the next one. Beside them, data parallel training under the same deaths as a model in virtual time
(`benchmarks/failing/models.py`), which exchanges gradients for nothing: synchronous, and elastic with a restart of the
workers at each change of the group.

    of_living        tokens in commits over those that peers could make from the first step of each life to the last
                     commit that took its work: what deaths cost those that live on. A life without one counts as
                     nothing, unless it goes on and has waited for more than a round and a half: then it counts whole
    counted          the share of these tokens for which commits count: a claim weighs at most twice the median claim of
                     its round (docs/security.md), so of speeds 1:8 the fastest two lose a part, deaths or not
    of_all           tokens in commits over those that all processes could make from their start to their death: the
                     time in which they start, and the unfinished work of the dead, count as lost
    at_work          tokens of all steps that they made over those that they could make from the first step of each life
                     to its end: the rest of the time they waited
    longest_wait     seconds that a living trainer made no step, beyond the one that it was at
    longest_round    seconds from one round to the next
    start            median seconds from the start of a process to its first step

Results are added to docs/results/goodput.json, one share at a time, and drawn as docs/results/goodput.svg (`--draw`:
this alone). Takes ten minutes a share on two cores. Needs root, iproute2, nftables and iptables. Exit code 1 where the
living lose more than 5 % of their work at 30 % deaths a round (12 % at 60 %), or a trainer waits for more than 10 s.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.bars import Panel, render_bars
from benchmarks.failing.models import Kind, Setting, simulate
from benchmarks.failing.swarm import BATCH_TOKENS, ROUND_SECONDS, Life, Record, observe, running, step_seconds
from tests.netlab.lab.namespaces import reason_unavailable

PEERS = 8
SHARES = (0.3, 0.6)
TARGETS: Final = {0.3: 0.95, 0.6: 0.88}
LONGEST_WAIT = 10.0
PATIENT_ROUNDS = 1.5  # in which the work of a peer that lives on may be on its way
RESULTS = Path(__file__).parent.parent / "docs" / "results" / "goodput.json"
PLOT = RESULTS.with_suffix(".svg")
KINDS: Final[tuple[Kind, ...]] = ("synchronous", "elastic")
COLOURS: Final = ("#1f6fb4", "#b0b0b0", "#e0a030")
Row = dict[str, Any]


@dataclass(frozen=True)
class Figures:
    """Of one share of deaths; see above. `models`: the same of data parallel training."""

    share: float
    round_seconds: float
    seconds: float
    rounds: int
    deaths: int
    of_living: float
    counted: float
    of_all: float
    at_work: float
    longest_wait: float
    longest_round: float
    start: float
    models: dict[str, dict[str, float]]
    date: str


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--share", type=float, nargs="*", default=SHARES, help="of the peers that die in a round")
    parser.add_argument("--seconds", type=float, default=340.0)
    parser.add_argument("--round", type=float, default=ROUND_SECONDS, help="seconds of training in a round")
    parser.add_argument("--again", action="store_true", help="also what was measured already")
    parser.add_argument("--draw", action="store_true", help="draw what was measured")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    rows = read_results()
    if not words.draw:
        if (reason := reason_unavailable()) is not None:
            parser.error(reason)
        for share in words.share:
            if words.again or f"{share:g}" not in rows:
                rows[f"{share:g}"] = asdict(measure(share, words.seconds, words.round))
                RESULTS.write_text(json.dumps(dict(sorted(rows.items())), indent=2) + "\n")
    PLOT.write_text(draw(rows))
    print(json.dumps(rows) if words.json else table(rows))
    return int(not all(is_reached(rows[key]) for key in map("{:g}".format, words.share) if key in rows))


def read_results() -> dict[str, Row]:
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {}


def is_reached(row: Row) -> bool:
    return bool(row["of_living"] >= TARGETS.get(row["share"], 0.0) and row["longest_wait"] <= LONGEST_WAIT)


def measure(share: float, seconds: float, round_seconds: float, seed: int = 0) -> Figures:
    with running(seed, PEERS, round_seconds) as swarm:
        record = observe(swarm, share, seed, seconds)
    record.round_seconds = round_seconds
    times = sorted(record.rounds.values())
    starts = [
        life.ready - life.begun for lives in record.lives.values() for life in lives[1:] if life.ready is not None
    ]
    start = statistics.median(starts) if starts else 0.0
    for name, taken in record.included.items():
        claimed = sum(tokens for _, tokens in taken)
        could = sum(possible_of(life, name, record, to_last_commit=True) for life in record.lives[name])
        lives = [
            f"{life.begun - record.began:.0f} {life.ready - record.began:.0f} "
            f"{(life.ended or record.ended) - record.began:.0f}, made {life.made}"
            for life in record.lives[name]
            if life.ready is not None
        ]
        print(f"{name}: {claimed} tokens in {len(taken)} commits, of {could:.0f}; lives {lives}", file=sys.stderr)
        print([(round(at - record.began), tokens) for at, tokens in taken], file=sys.stderr)
    return Figures(
        share,
        round_seconds,
        round(record.ended - record.began, 1),
        len(times) - 1,
        len(record.deaths),
        round(share_of_living(record), 3),
        round(record.counted / record.tokens, 3),
        round(share_of_all(record), 3),
        round(share_at_work(record), 3),
        round(max(standing.longest for standing in record.standing.values()), 1),
        round(max(later - earlier for earlier, later in zip(times, times[1:], strict=False)), 1),
        round(start, 1),
        {kind: model(kind, share, round_seconds, start) for kind in KINDS},
        time.strftime("%Y-%m-%d"),
    )


def share_of_living(record: Record) -> float:
    """Tokens that commits took of each life, at most what it could make until then, over what it could make.

    A contribution of a first life may hold work from before the begin, so it counts for no more than the life could do.
    """
    pairs = [
        (min(tokens_of(life, name, record), could), could)
        for name in record.lives
        for life in record.lives[name]
        if (could := possible_of(life, name, record, to_last_commit=True)) > 0
    ]
    return sum(taken for taken, _ in pairs) / sum(could for _, could in pairs)


def share_of_all(record: Record) -> float:
    """Tokens in commits, over those that all processes could make from their start to their death."""
    could = sum(
        possible_of(life, name, record, to_last_commit=False) for name in record.lives for life in record.lives[name]
    )
    return record.tokens / could


def share_at_work(record: Record) -> float:
    """Tokens of the steps that were made, over those that could be made once a life had made its first."""
    pairs = [
        (life.made, rate * ((record.ended if life.ended is None else life.ended) - life.ready))
        for name, rate in rates_of(record).items()
        for life in record.lives[name]
        if life.ready is not None
    ]
    return sum(made for made, _ in pairs) / sum(could for _, could in pairs)


def rates_of(record: Record) -> dict[str, float]:
    """Tokens per second of each peer."""
    return dict(zip(record.lives, (BATCH_TOKENS / each for each in step_seconds(len(record.lives))), strict=True))


def possible_of(life: Life, name: str, record: Record, to_last_commit: bool) -> float:
    begin = (record.ended if life.ready is None else life.ready) if to_last_commit else life.begun
    return rates_of(record)[name] * max(0.0, end_of(life, name, record, to_last_commit) - begin)


def end_of(life: Life, name: str, record: Record, to_last_commit: bool) -> float:
    end = record.ended if life.ended is None else life.ended
    if not to_last_commit:
        return end
    last = max((at for at, _ in taken_of(life, name, record)), default=life.begun)
    is_left_out = life.ended is None and end - last > PATIENT_ROUNDS * record.round_seconds
    return end if is_left_out else min(end, last)


def tokens_of(life: Life, name: str, record: Record) -> int:
    return sum(tokens for _, tokens in taken_of(life, name, record))


def taken_of(life: Life, name: str, record: Record) -> list[tuple[float, int]]:
    """When commits took how many tokens of a life: those from its start to that of the next one."""
    back = min((other.begun for other in record.lives[name] if other.begun > life.begun), default=record.ended)
    return [(at, tokens) for at, tokens in record.included.get(name, ()) if life.begun < at <= back]


def model(kind: Kind, share: float, period: float, start: float) -> dict[str, float]:
    rates = [BATCH_TOKENS / each for each in step_seconds(PEERS)]
    found = simulate(kind, Setting(rates, share, period, start, checkpoint=period))
    return {name: round(value, 3) for name, value in asdict(found).items()}


def table(rows: dict[str, Row]) -> str:
    lines = ["| deaths a round | | of the living | of all | longest wait | rounds |", "|---|---|---|---|---|---|"]
    for row in rows.values():
        lines.append(
            f"| {row['share']:.0%} | Murmuration | {row['of_living']:.1%} | {row['of_all']:.1%} | "
            f"{row['longest_wait']:.0f} s | {row['rounds']}, at most {row['longest_round']:.0f} s |"
        )
        for name, found in row["models"].items():
            shown = f"{found['of_ready']:.1%} | {found['of_all']:.1%} | {found['longest_stall']:.0f} s"
            lines.append(f"| | {name} data parallel (model) | {shown} | |")
    return "\n".join(lines)


def draw(rows: dict[str, Row]) -> str:
    """Draw bars of `of_all`, which counts everything, by share of deaths."""
    groups = [
        (f"{row['share']:.0%} die", [row["of_all"], *(row["models"][kind]["of_all"] for kind in KINDS)])
        for row in rows.values()
    ]
    title, caption = "peers that die in every round", "% of all work that counts (data parallel: models)"
    return render_bars([Panel(title, ("Murmuration", *KINDS), groups, caption, COLOURS)])


if __name__ == "__main__":
    sys.exit(main())
