"""The facts of a run for its page, from its manifest. Pure."""

from pathlib import Path

from node.dashboard.events import RunAbout, RunFacts
from node.model import shape_table
from protocol.identity import PeerId
from protocol.manifest.run import Manifest
from protocol.manifest.sections import DataSection, SourceSection


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
        about=RunAbout(**manifest.about.model_dump(), source=describe_sources(manifest.data)),
    )


def describe_sources(data: DataSection) -> str:
    """Return the sources of the text with their shares at the beginning of the run."""
    if data.source == "own":
        return data.source
    if len(data.mixture) == 1:
        return _describe_source(data.mixture[0])
    total = sum(data.first_weights)
    shares = ((source, f"{source.weight / total:.0%}") for source in data.mixture)
    return ", ".join(f"{source.name} {share} ({_describe_source(source)})" for source, share in shares)


def _describe_source(source: SourceSection) -> str:
    """Return the data set's name; of a path on some machine, only the end."""
    name = Path(source.path).name if source.source != "hf" else source.path
    return f"{source.source}: {name}" if name else source.source
