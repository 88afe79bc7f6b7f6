"""Shows what happens under a seed: `python -m tests.simulation.replay SEED [--isolating]`."""

import sys

from tests.simulation.story import BrokenError, Story


def main() -> None:
    story = Story(int(sys.argv[1]), isolating="--isolating" in sys.argv[2:])
    try:
        story.run()
    except BrokenError as broken:
        story.print_trace()
        sys.exit(str(broken))
    story.print_trace()


if __name__ == "__main__":
    main()
