"""Fill in what the package index shows and only a release knows: where the project is, and absolute links in README.

A forge that builds a tag says both in its environment (`GITHUB_REPOSITORY`, `GITHUB_REF_NAME`). A wheel that is built
anywhere else has no addresses, so that none is invented.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PAGE = re.compile(r"\]\((?!https?://|#|mailto:)([^)\s]+)\)")
IMAGES = (".png", ".svg")


class AddressHook(MetadataHookInterface):
    """Set `urls` and `readme`, which pyproject.toml leaves to the build."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository, tag = os.environ.get("GITHUB_REPOSITORY", ""), os.environ.get("GITHUB_REF_NAME", "main")
        server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
        if repository:
            home = f"{server}/{repository}"
            metadata["urls"] = {
                "Homepage": home,
                "Documentation": f"{home}/tree/{tag}/docs",
                "Changelog": f"{home}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{home}/issues",
            }
            text = PAGE.sub(lambda found: f"]({home}/{_view_of(found[1])}/{tag}/{found[1]})", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def _view_of(path: str) -> str:
    """Return the forge's view of a path: the bytes of an image, the page of anything else."""
    return "raw" if path.endswith(IMAGES) else "blob"
