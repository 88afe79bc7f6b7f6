"""A peer that asks nobody to carry blobs for it: `python -m tests.netlab.lab.lonely_peer join RUN ...`."""

from node.cli import main
from node.daemon.peers import downloads

if __name__ == "__main__":
    downloads.MAX_RELAYS = 0
    main()
