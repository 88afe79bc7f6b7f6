"""The commands of `murmur`. Heavy modules are imported inside a command, so that `murmur --help` is immediate.

Exit codes are those of `protocol.errors` (see docs/reference/exit-codes.md), and 130 after Ctrl-C.
"""

import os
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer

from node.commands import models
from node.commands.console import (
    MAX_COUNT,
    MAX_SEED,
    GroupedCommand,
    ImportOption,
    InsecureOption,
    JsonOption,
    ModelArgument,
    PeerOption,
    PlainGroup,
    loading,
    run_guarded,
    say_when_interrupted,
)
from node.flags import MachineFlags, NodeFlags, expand_flags
from node.processes.process import prepare_standard_streams, rare_garbage_collection

app = typer.Typer(
    cls=PlainGroup,
    help="Train one language model together on machines anywhere on the internet.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Examples: `murmur up` trains a small model with three peers on this machine; `murmur join run.toml` joins "
    "a run; `murmur status` shows what the nodes do; `murmur export DIR model` exports the model.",
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"murmur {version('murmuration')}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: murmur init run.toml --text 'texts/*.txt' --size small")
def init(
    *,
    target: Annotated[Path, typer.Argument(metavar="RUN.toml", help="the file to write")] = Path("run.toml"),
    name: Annotated[str | None, typer.Option(help="name of the run")] = None,
    description: Annotated[str | None, typer.Option(help="a sentence about the run")] = None,
    text: Annotated[
        str | None, typer.Option(help="files to train on: a pattern, a folder, hf:NAME of a data set, or python-stdlib")
    ] = None,
    size: Annotated[str | None, typer.Option(help="size of the model: tiny, small, medium or large")] = None,
    peers: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="peers to wait for before the first round")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="COUNT", help="end of the run, such as 100M (default: 20 per parameter)")
    ] = None,
    tokenizer: Annotated[str, typer.Option(metavar="FILE", help="a Hugging Face tokenizer.json (default: bytes)")] = "",
    organiser: Annotated[str, typer.Option(help="your name, shown on the page")] = "",
    licence: Annotated[str, typer.Option(help="licence of the model, such as Apache-2.0")] = "",
    recipe: Annotated[str, typer.Option(help="method of training; see `murmur recipes`")] = "frugal",
    public: Annotated[
        bool, typer.Option("--public", help="for strangers: only keys with a ticket of yours take part")
    ] = False,
    rl: Annotated[
        str,
        typer.Option(
            metavar="TASK",
            help="learn from scores: reverse, brackets, sort, arithmetic, countdown, or a file with your own task",
        ),
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="ask nothing; take the defaults")] = False,
) -> None:
    """Write a first manifest: five questions, or flags."""
    with rare_garbage_collection():
        from node.commands.init import InitOptions
        from node.commands.init import init as write_manifest

    options = InitOptions(
        name=name,
        description=description,
        text=text,
        size=size,
        peers=peers,
        tokens=tokens,
        tokenizer=tokenizer,
        organiser=organiser,
        licence=licence,
        recipe=recipe,
        public=public,
        rl=rl,
    )
    write_manifest(target, options, ask=sys.stdin.isatty() and not yes)


@app.command(cls=GroupedCommand, epilog="Example: murmur up run.toml --peers 4 --rounds 40")
@expand_flags
def up(
    *,
    run: Annotated[Path | None, typer.Argument(metavar="RUN.toml", help="the manifest (default: the demo)")] = None,
    peers: Annotated[int | None, typer.Option(min=1, max=64, help="number of peers (default: at least 3)")] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=MAX_COUNT, help="stop after this many rounds instead of the target")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="run directory, resumed if it exists (default: runs/NAME-N)")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="train with this method, or a variant such as diloco:inner_steps=30")
    ] = None,
    drill: Annotated[
        bool | None, typer.Option(help="kill one peer half-way and restart it (default in the demo)")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=MAX_SEED, help="seed of the weights and the data order")
    ] = None,
    http: Annotated[
        str | None, typer.Option(metavar="ADDR", help="also serve the page of the run, as `murmur host` does")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only say what it takes of this machine, and how fast it can be")
    ] = False,
    imports: ImportOption = None,
    flags: MachineFlags,
    as_json: JsonOption = False,
) -> None:
    """Train with several peers on this machine until the run reaches its target."""
    with loading():
        from node.commands.up.up import UpOptions
        from node.commands.up.up import up as run_swarm

    options = UpOptions(
        run=run,
        folder=folder,
        peers=peers,
        rounds=rounds,
        recipe=recipe,
        seed=seed,
        drill=drill,
        json=as_json,
        http=http,
        dry_run=dry_run,
        imports=tuple(imports or ()),
        flags=flags,
    )
    raise typer.Exit(run_swarm(options))


@app.command(cls=GroupedCommand, epilog="Example: murmur join https://run.example.org/run.toml")
@expand_flags
def join(
    *,
    run: Annotated[str, typer.Argument(metavar="RUN", help="a manifest file, an http(s) URL or a murmur:// link")],
    folder: Annotated[
        Path | None, typer.Option("--dir", help="the node's directory (default: ~/.local/state/murmur/NAME-RUNID)")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="also accept plain http:// over the internet")] = False,
    allow_data: Annotated[
        bool, typer.Option("--allow-data", help="let a downloaded manifest stream its data set from the internet")
    ] = False,
    ticket: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the organiser's ticket for this node; it is kept")
    ] = None,
    _: ImportOption = None,
    base_model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="the model that the run's adapter changes: a directory, or hf:NAME@REVISION"),
    ] = None,
    role: Annotated[
        Literal["trainer", "rollout"],
        typer.Option(
            help="trainer; or rollout: answer questions with the newest model, for runs that learn from scores"
        ),
    ] = "trainer",
    flags: NodeFlags,
) -> None:
    """Join a run and train. A restarted node resumes."""
    from node.commands.join.command import join_run

    join_run(
        run, flags, folder=folder, insecure=insecure, allow_data=allow_data, ticket=ticket, base_model=base_model,
        role=role,
    )  # fmt: skip


@app.command(cls=GroupedCommand, epilog="Example: murmur host run.toml --http 0.0.0.0:8080")
@expand_flags
def host(
    *,
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="the manifest")],
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="identity and event log (default: ~/.local/state/murmur/hosts/NAME-RUNID)"),
    ] = None,
    http: Annotated[
        str, typer.Option(metavar="ADDR", help="address of the web page; use 0.0.0.0:8080 to serve other machines")
    ] = "127.0.0.1:8080",
    public_url: Annotated[str | None, typer.Option(help="the page's public URL if it is behind a proxy")] = None,
    public: Annotated[bool, typer.Option("--public", help="announce the run for `murmur runs`")] = False,
    train: Annotated[bool, typer.Option("--train/--watch", help="train, or only observe")] = False,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="keep the newest model on disk and serve it (default: keep)")
    ] = True,
    eval_every: Annotated[
        int | None,
        typer.Option(metavar="ROUNDS", min=1, help="evaluate the model every ROUNDS rounds"),
    ] = None,
    tasks: Annotated[
        list[str] | None, typer.Option("--tasks", metavar="TASK", help="for --eval-every: as for `murmur eval`")
    ] = None,
    _: ImportOption = None,
    flags: NodeFlags,
) -> None:
    """Host a run: a first peer for others to connect to, a web page, and the link to join."""
    with loading():
        from node.dashboard.command import HostOptions
        from node.dashboard.command import host as open_run
        from node.dashboard.evaluations import plan_of

    open_run(
        HostOptions(
            run=run,
            folder=folder,
            http=http,
            public_url=public_url,
            public=public,
            train=train,
            keep=keep,
            evaluates=plan_of(eval_every, tasks or ()),
            flags=flags,
        )
    )


@app.command(epilog="Example: murmur steer https://run.example.org/run.toml --set target.rounds=200")
def steer(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="as for `murmur join`, or the directory of one of its nodes")
    ],
    action: Annotated[
        Literal["stop", "pause", "resume"] | None, typer.Argument(help="end the run, or pause it and go on")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change a key of the manifest (repeatable)")
    ] = None,
    from_round: Annotated[
        int | None, typer.Option(min=0, help="round from which it holds (default: one that all peers hear of in time)")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="the organiser's key (default: ~/.local/state/murmur/organiser.key)")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="also accept plain http:// over the internet")] = False,
    as_json: JsonOption = False,
) -> None:
    """Change a running manifest as its organiser, or list the changes so far."""
    from node.commands.steer import SteerOptions
    from node.commands.steer import steer as steer_run

    steer_run(
        SteerOptions(
            run=run, action=action, changes=tuple(changes or ()), from_round=from_round, key=key, insecure=insecure,
            json=as_json,
        )
    )  # fmt: skip


@app.command(epilog="Example: murmur doctor https://run.example.org/run.toml")
def doctor(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="as for `murmur join`")] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="the node's directory (default: that of the run)")
    ] = None,
    listen: Annotated[list[str] | None, typer.Option(metavar="MULTIADDR", help="as for `murmur join`")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="also accept plain http:// over the internet")] = False,
    _: ImportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check whether this machine can take part, and show what to fix."""
    from node.commands.doctor.command import doctor as examine

    raise typer.Exit(examine(run, folder, tuple(listen or ()), insecure, as_json))


@app.command(epilog="Example: murmur plan run.toml --peers peers.toml")
def plan(
    run: Annotated[str, typer.Argument(metavar="RUN", help="as for `murmur join`")],
    peers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML file of the machines (default: typical volunteers)")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="also accept plain http:// over the internet")] = False,
    _: ImportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the share of their compute that peers can use in a run, and show what limits it."""
    with loading():
        from node.commands.plan.command import plan as show_plan

    show_plan(run, peers, insecure, as_json)


@app.command(epilog="Example: murmur runs --peer /ip4/203.0.113.7/tcp/4001/p2p/12D3...")
def runs(
    peer: Annotated[list[str] | None, typer.Option(metavar="MULTIADDR", help="also ask this peer (repeatable)")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the public runs that hosts have announced."""
    from node.commands.join.public_runs import show_runs

    show_runs(tuple(peer or ()), as_json)


@app.command(epilog="Example: murmur replay demo/events.jsonl --http 8081")
def replay(
    event_file: Annotated[Path, typer.Argument(metavar="FILE", help="the events.jsonl of a host")],
    http: Annotated[str, typer.Option(metavar="ADDR", help="address of the web page")] = "127.0.0.1:8080",
) -> None:
    """Show the page of a recorded run."""
    from node.dashboard.command import replay as serve_replay

    serve_replay(event_file, http)


@app.command(epilog="Example: murmur status runs/demo-1 --json")
def status(
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="default: all running nodes")] = None,
    check: Annotated[bool, typer.Option("--check", help="exit with an error if no node answers")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show for each node what it does and whether it contributes, and count its errors by reason."""
    from node.commands.status import status_lines

    for line in status_lines(folder, as_json, check):
        typer.echo(line)


@app.command(epilog="Example: murmur receipt ~/.local/state/murmur/hosts/demo-1a2b3c4d mary")
def receipt(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the directory of `murmur host` or `murmur join`")],
    peer: Annotated[
        str | None, typer.Argument(metavar="PEER", help="a name or a peer id (default: everybody who gave work)")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="file of the receipt (default: DIR/receipts/NAME-ID.json)")] = None,
) -> None:
    """Write receipts: how many tokens each volunteer gave to the run, provable by the signed commits."""
    from node.commands.receipts import write_receipts

    for line in write_receipts(folder, peer, out):
        typer.echo(line)


@app.command(epilog="Example: murmur verify mary.json commits.log --run run.toml")
def verify(
    receipts: Annotated[list[Path], typer.Argument(metavar="RECEIPT...", help="files of `murmur receipt`")],
    commits: Annotated[Path, typer.Argument(metavar="COMMITS", help="the commits.log of the host")],
    issuer: Annotated[str | None, typer.Option(metavar="PEER_ID", help="require receipts that this key signed")] = None,
    run: Annotated[Path | None, typer.Option(metavar="MANIFEST", help="require receipts of this run")] = None,
    trust: Annotated[
        str | None, typer.Option(metavar="POINT", help="a round of the run for which you have somebody's word")
    ] = None,
) -> None:
    """Check receipts offline against the signed commits of the run, and name the proof that binds them to it."""
    from node.commands.receipts import VerifyOptions, verify_files

    for line in verify_files(receipts, commits, VerifyOptions.of(issuer, run, trust)):
        typer.echo(line)


@app.command(epilog="Example: murmur rollback ~/.local/state/murmur/demo-1a2b3c4d --round 120")
def rollback(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the directory of a node that is stopped")],
    round_number: Annotated[
        int | None, typer.Option("--round", min=0, help="return to the checkpoint of this round (default: list them)")
    ] = None,
) -> None:
    """List a node's checkpoints, or return to an earlier one."""
    from node.commands.rollback import roll_back

    for line in roll_back(folder, round_number):
        typer.echo(line)


@app.command(epilog="Example: murmur key ~/.local/state/murmur/demo-1a2b3c4d")
def key(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a node's directory")],
    create: Annotated[
        bool, typer.Option("--create", help="create the key, and DIR, of a node that has not run")
    ] = False,
) -> None:
    """Show the peer id of a node."""
    from node.commands.status import key_line

    typer.echo(key_line(folder, create))


@app.command(epilog="Example: murmur rank 10.0.0.1:29400 --token TOKEN --device all")
def rank(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="the --site of the first machine")],
    token: Annotated[
        str, typer.Option(envvar="MURMUR_SITE_TOKEN", help="the token that the first machine prints (required)")
    ] = "",
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="device to train on: auto, cpu, cuda, cuda:1, all (cards), or mps")
    ] = "auto",
    devices: Annotated[
        str | None, typer.Option(metavar="LIST", help="train on these cards together, such as 0,1")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of all ranks here together (default: all cores)")
    ] = None,
    _: ImportOption = None,
) -> None:
    """Train on this machine as a part of another machine's node, which runs with --site."""
    with loading():
        from node.trainer.site.agent import RankOptions, serve_site

    serve_site(RankOptions(address=address, token=token, device=device, devices=devices, threads=threads))


@app.command(epilog="Example: murmur ticket run.toml 12D3KooW... --until 30d --note mary")
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
    host: Annotated[
        bool, typer.Option("--host", help="instead vouch for the key of a host, which saves the line as DIR/voucher")
    ] = False,
    key: Annotated[
        Path | None, typer.Option(help="the organiser's key (default: ~/.local/state/murmur/organiser.key)")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="also accept plain http:// over the internet")] = False,
) -> None:
    """Let a key take part in a run of tickets, or host it, as its organiser; without a KEY, list the tickets so far."""
    from node.commands.tickets import TicketOptions, run_tickets

    run_tickets(
        TicketOptions(
            run=run,
            holder=holder,
            until=until,
            note=note,
            out=out,
            revoke=revoke,
            host=host,
            key=key,
            insecure=insecure,
        )  # fmt: skip
    )


@app.command("eval", epilog="Example: murmur eval runs/demo-1, or murmur eval runs/demo-1 --tasks tasks/quiz.yaml")
def evaluate_model(
    source: ModelArgument,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            "--tasks", metavar="TASK", help="lm-eval tasks: names, YAML files, folders (default: held-out text)"
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="RUN.toml", help="manifest with the held-out text (default: the run's)"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=MAX_COUNT, help="most windows of text, or examples of each task")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, max=4096, help="sequences at a time (default: 8, or train.microbatch if less)")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="device to compute on: auto, cpu, cuda, cuda:1 or mps")
    ] = "auto",
    peer: PeerOption = None,
    insecure: InsecureOption = False,
    allow_data: Annotated[
        bool, typer.Option("--allow-data", help="let a downloaded manifest stream its data set from the internet")
    ] = False,
    _: ImportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a model on held-out text, or on tasks of lm-eval, and note the results in its folder."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # the progress bars of lm-eval
    with say_when_interrupted("no result was noted"):
        with loading():
            from node.commands.eval.command import EvalOptions, print_results
            from node.commands.eval.command import evaluate as run_evaluation
        options = EvalOptions(
            source=source,
            tasks=tuple(tasks or ()),
            data=data,
            limit=limit,
            batch=batch,
            device=device,
            peers=tuple(peer or ()),
            insecure=insecure,
            allow_data=allow_data,
        )
        results = run_evaluation(options)
    print_results(results, as_json)


for command, example in models.COMMANDS:
    app.command(epilog=example)(command)


def main() -> None:
    """Run the command line and exit."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch requests huge pages, which halve the cost of new tensors
    os.environ["PYTHONSAFEPATH"] = "1"  # processes that libraries start must not import from the working directory
    prepare_standard_streams()
    code = run_guarded(app)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a late interrupt would only change the exit code
    sys.exit(code)


if __name__ == "__main__":
    main()
