"""The command of a further machine of a site: rank."""

from typing import Annotated

import typer

from node.commands.waiting import loading


def rank(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="the --site of the first machine")],
    token: Annotated[
        str, typer.Option(envvar="MURMUR_SITE_TOKEN", help="the token that the first machine prints (required)")
    ] = "",
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="device to train on: auto, cpu, cuda, cuda:1, or all (cards)")
    ] = "auto",
    devices: Annotated[
        str | None, typer.Option(metavar="LIST", help="train on these cards together, such as 0,1")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of all ranks here together (default: all cores)")
    ] = None,
) -> None:
    """Train on this machine as a part of another machine's node, which runs with --site."""
    with loading():
        from node.trainer.site.agent import RankOptions, serve_site

    serve_site(RankOptions(address=address, token=token, device=device, devices=devices, threads=threads))


COMMANDS = ((rank, "Example: murmur rank 10.0.0.1:29400 --token TOKEN --device all"),)
