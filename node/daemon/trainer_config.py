"""The configuration with which the daemon starts a trainer."""

from node.data.batches import VALIDATION_TOKENS
from node.options import NodeOptions
from node.run_dir import RunDir
from node.trainer.ipc.channel import SiteConfig, StageConfig, TrainerConfig
from node.units import parse_host_port
from protocol.identity import PeerId
from protocol.manifest.run import Manifest


def build_trainer_config(
    manifest: Manifest,
    options: NodeOptions,
    run_dir: RunDir,
    peer_id: PeerId,
    number: int,
    stage: StageConfig | None = None,
) -> TrainerConfig:
    """Return what the trainer of this node needs to begin with round `number`."""
    return TrainerConfig(
        manifest=manifest.to_toml(),
        base=str(options.base),
        blobs=str(run_dir.blobs),
        peer_id=peer_id,
        options=options.for_trainer,
        round=number,
        validation_tokens=VALIDATION_TOKENS,
        stage=stage,
        site=_site_config(options, run_dir),
    )


def _site_config(options: NodeOptions, run_dir: RunDir) -> SiteConfig | None:
    if options.site is None:
        return None
    host, port = parse_host_port(options.site, "--site")
    return SiteConfig(host=host, port=port, key=str(run_dir.site_key), shard=options.site_shard)
