"""The checks of `murmur host` before it starts anything."""

from pathlib import Path

import pytest

from node.dashboard.command import HostOptions, host
from node.flags import NodeFlags
from protocol.errors import ManifestError
from tests.node.small_run import MANIFEST


def test_unknown_method_fails_before_the_folder_is_locked(tmp_path: Path) -> None:
    run, folder = tmp_path / "run.toml", tmp_path / "host"
    run.write_text(MANIFEST.to_toml().replace('recipe = "', 'recipe = "x'))
    with pytest.raises(ManifestError, match="did you mean"):
        host(HostOptions(run=run, folder=folder, http="127.0.0.1:0", flags=NodeFlags(device="cpu")))
    assert not folder.exists()
