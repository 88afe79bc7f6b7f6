"""Commands that need no network: export, generate, chat, serve, tokenize, sim, recipes. Heavy imports are inside."""

import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from node.commands.console import (
    MAX_COUNT,
    MAX_SEED,
    ImportOption,
    InsecureOption,
    JsonOption,
    ModelArgument,
    PeerOption,
    loading,
    names_run,
    say_when_interrupted,
)
from protocol.errors import UsageError

NOTHING_WRITTEN = "nothing was written; run it again"
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token")]
TopKOption = Annotated[int | None, typer.Option(min=1, help="sample from the k most likely tokens (default: all)")]
TopPOption = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="sample from the most likely tokens of this probability together")
]
DeviceOption = Annotated[
    str, typer.Option(metavar="DEVICE", help="device to write on: auto, cpu, cuda, cuda:1, or mps")
]
SamplingSeedOption = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="seed of the sampling")]


def export(
    source: Annotated[
        str,
        typer.Argument(metavar="DIR|RUN", help="directory of `murmur join`, `up` or `host`; or a RUN of `murmur join`"),
    ],
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="a new or an empty directory; --push needs none")
    ] = None,
    push: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="send it to this repository of the Hugging Face Hub")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="with --push: create a private repository")] = False,
    peer: PeerOption = None,
    insecure: InsecureOption = False,
    _: ImportOption = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="of a run with an adapter: the whole model, with the adapter added")
    ] = False,
) -> None:
    """Export the newest model as a Hugging Face directory: that of a node's directory, or that of a run's peers."""
    if push is not None:
        _export_to_hub(source, out, push, private, peer or (), insecure, merged)
        return
    if out is None:
        raise UsageError("name a directory to write, or --push ORG/NAME")
    if private:
        raise UsageError("--private needs --push ORG/NAME")
    with say_when_interrupted(f"{out} is as it was before"):
        number = _export_to(source, out, peer or (), insecure, merged)
    typer.echo(f"the model of round {number} is in {out}")


def _export_to(source: str, out: Path, peers: Sequence[str], insecure: bool, merged: bool, repository: str = "") -> int:
    """Write the export of a folder or a run; return its round. The card names the repository, if there is one."""
    if names_run(source):
        with loading():
            from node.commands.fetch_model import fetch_model

        return fetch_model(source, out, peers=tuple(peers), insecure=insecure, merged=merged, repository=repository)
    from node.paths import find_trained_dir

    node = find_trained_dir(Path(source))
    with loading():
        from node.model.export import export as export_model

    return export_model(node, out, merged=merged, repository=repository)


def _export_to_hub(
    source: str, out: Path | None, name: str, private: bool, peers: Sequence[str], insecure: bool, merged: bool
) -> None:
    """Export to OUT or a temporary directory, and send it. Name and token are checked before the work begins."""
    from node.hub import HubRepository

    repository = HubRepository.open(name, "--push")
    with (
        say_when_interrupted("nothing was sent, or not all of it; run it again"),
        tempfile.TemporaryDirectory(prefix="murmur-") as temporary,
    ):
        folder = out or Path(temporary) / "model"
        number = _export_to(source, folder, peers, insecure, merged, name)
        address = repository.push(folder, number, private)
    typer.echo(f"the model of round {number} is at {address}")


def generate(
    source: ModelArgument,
    prompt: Annotated[str, typer.Option(help="the beginning of the text")],
    tokens: Annotated[
        int, typer.Option(min=1, max=MAX_COUNT, help="most tokens to generate; the end of a document ends it")
    ] = 200,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = None,
    top_p: TopPOption = 1.0,
    seed: SamplingSeedOption = 0,
    device: DeviceOption = "auto",
    peer: PeerOption = None,
    insecure: InsecureOption = False,
    _: ImportOption = None,
) -> None:
    """Continue a text with the newest checkpoint of a node, an exported model, or the newest model of a run."""
    with loading():
        from node.commands.console import named_device, open_model
        from node.model.generate import Sampling, continue_text, require_sampling
    from node.monitoring.logs import sanitize

    sampling = Sampling(temperature, top_k, top_p, seed)
    require_sampling(prompt, tokens, sampling)
    place = named_device(device)
    pieces = continue_text(open_model(source, peer or (), insecure), prompt, tokens, sampling, place)
    for piece in itertools.chain((sanitize(prompt, "\n\t"),), pieces):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def chat(
    source: ModelArgument,
    system: Annotated[str, typer.Option(help="a message to the model before the conversation")] = "",
    tokens: Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="most tokens of an answer")] = 512,
    temperature: TemperatureOption = 0.8,
    top_k: TopKOption = None,
    top_p: TopPOption = 1.0,
    seed: SamplingSeedOption = 0,
    device: DeviceOption = "auto",
    peer: PeerOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Open a conversation with a model that was trained on conversations."""
    with loading():
        from node.commands.chat import chat as talk
        from node.commands.console import named_device, open_model
        from node.model.generate import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    sampling.require_valid()
    place = named_device(device)
    talk(source, open_model(source, peer or (), insecure), system, tokens, sampling, place)


def serve(
    source: ModelArgument,
    http: Annotated[str, typer.Option(metavar="ADDR", help="address of the server")] = "127.0.0.1:8000",
    device: DeviceOption = "auto",
    peer: PeerOption = None,
    insecure: InsecureOption = False,
    _: ImportOption = None,
) -> None:
    """Answer completions and conversations over HTTP, by the calls of OpenAI."""
    with loading():
        import asyncio

        from node.commands.console import named_device, open_model
        from node.commands.serving import build_server, run_server

    place = named_device(device)
    server = build_server(open_model(source, peer or (), insecure), source, place)
    with say_when_interrupted("the server has ended"):
        asyncio.run(run_server(server, http))


def tokenize(
    tokenizer: Annotated[Path, typer.Argument(metavar="TOKENIZER", help="a Hugging Face tokenizer.json")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="a new or an empty directory for the shards")],
    files: Annotated[list[Path], typer.Argument(metavar="FILES", help="UTF-8 text files")],
) -> None:
    """Convert text files to token shards for the data source `tokens`."""
    from node.data.token_shards import tokenize_files

    with say_when_interrupted(f"{out} and your files are as they were before"):
        count = tokenize_files(tokenizer, files, out)
    typer.echo(f"the shards are in {out}: {count:,} tokens")


def sim(
    recipe: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE", help="names from `murmur recipes`, also with options: frugal:inner_steps=30,codec.k=32"
        ),
    ],
    peers: Annotated[int, typer.Option(min=1, max=1000, help="number of virtual peers")] = 8,
    steps: Annotated[int | None, typer.Option(min=1, help="inner steps per peer (default: 200)")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="tokens of all peers together, instead of --steps")] = None,
    speeds: Annotated[
        str, typer.Option(help="inner steps per second: one value, or one per peer (comma-separated)")
    ] = "1",
    bandwidth: Annotated[str, typer.Option(metavar="MBIT", help="Mbit/s per link: one value, or one per peer")] = "100",
    latency: Annotated[float, typer.Option(metavar="MS", min=0.0, help="one-way latency in ms")] = 50.0,
    churn: Annotated[
        float, typer.Option(metavar="SHARE", min=0.0, max=0.45, help="fraction of the peers that die in each round")
    ] = 0.0,
    liars: Annotated[
        str | None,
        typer.Option(
            metavar="F:KIND",
            help="fraction of peers that lie, and how, such as 0.25:sign-flip",
        ),
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(
            min=1, max=128, help="also simulate pipelines: cut the model, and share the peers among the stages"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="runs per recipe")] = 3,
    run: Annotated[
        Path | None, typer.Option(help="take model, data, training and deadlines from this manifest")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--set", metavar="PART.OPTION=VALUE", help="set a recipe option (repeatable)")
    ] = None,
    as_json: JsonOption = False,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE.csv", help="write the figures as CSV, a row a seed"),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="plot the loss against bytes and time")] = None,
    imports: ImportOption = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="compile the model in bf16 (needs a C++ compiler); for long runs")
    ] = False,
) -> None:
    """Compare methods with virtual peers, real gradients and a virtual network."""
    with say_when_interrupted(NOTHING_WRITTEN), loading():
        from node.simulation.command import SimulationOptions, simulate

    options = SimulationOptions(
        tuple(recipe), peers, steps, tokens, speeds, bandwidth, latency, churn, liars, seeds, run,
        tuple(option or ()), as_json, plot, compiled, stages, tuple(imports or ()), csv,
    )  # fmt: skip
    with say_when_interrupted(NOTHING_WRITTEN):
        simulate(options)


def recipes(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="one recipe in full")] = None,
    parts: Annotated[bool, typer.Option("--parts", help="the parts of all recipes, for a wide terminal")] = False,
    run: Annotated[
        Path | None, typer.Option("--for", metavar="RUN.toml", help="advise a recipe for this run and its peers")
    ] = None,
    peers: Annotated[
        Path | None, typer.Option(metavar="FILE", help="with --for: the peers, as for `murmur plan`")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the training methods: which to take, how each works, its parts."""
    from node.commands.recipe_list import advise, show_recipes

    if run is None:
        if peers is not None:
            raise UsageError("--peers needs --for RUN.toml")
        show_recipes(name, as_json, parts)
        return
    if name is not None or parts:
        raise UsageError("--for advises among all recipes; leave out NAME and --parts")
    with loading():
        advise(run, peers, as_json)


COMMANDS = (
    (export, "Example: murmur export runs/demo-1 model, or murmur export https://run.example.org/run.toml model"),
    (generate, "Example: murmur generate runs/demo-1 --prompt 'def '"),
    (chat, "Example: murmur chat runs/demo-1"),
    (serve, "Example: murmur serve model, then POST to http://127.0.0.1:8000/v1/chat/completions"),
    (tokenize, "Example: murmur tokenize tokenizer.json shards corpus/*.txt"),
    (sim, "Example: murmur sim frugal:inner_steps=30 frugal:inner_steps=100 diloco --steps 400 --csv curves.csv"),
    (recipes, "Example: murmur recipes sparseloco"),
)  # each with its example
