"""The facts of a run for its page, from its manifest. Pure."""

from pathlib import Path

from node.dashboard.events import RunAbout, RunFacts
from node.model import shape_table
from protocol.identity import PeerId
from protocol.manifest import DataSection, Manifest


def run_facts(base: Manifest, organiser: PeerId, revised: Manifest | None = None) -> RunFacts:
    """Return the facts of a run, whose manifest at its beginning is `base`, with the organiser's revisions."""
    manifest = revised or base
    return RunFacts(
        run=manifest.run.name,
        run_id=base.run_id,
        recipe=manifest.method.recipe,
        parameters=shape_table(manifest.model).numel,
        batch_tokens=manifest.train.batch_tokens,
        min_peers=manifest.run.min_peers,
        stages=manifest.pipeline.stages,
        target_rounds=manifest.target.rounds,
        target_tokens=manifest.target.tokens,
        organiser=organiser,
        expiry=manifest.membership.expiry,
        about=RunAbout(**manifest.about.model_dump(), source=describe_source(manifest.data)),
    )


def describe_source(data: DataSection) -> str:
    """Return the data set's name; of a path on some machine, only the end."""
    name = Path(data.path).name if data.source != "hf" else data.path
    return f"{data.source}: {name}" if name else data.source
