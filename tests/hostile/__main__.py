"""Attack a live swarm of real processes: `python -m tests.hostile ATTACK... [--json]`; `all` runs every attack."""

import argparse
import json
import time

from tests.hostile.attacks import ATTACKS
from tests.hostile.scoreboard import Result
from tests.hostile.template import Template
from tests.hostile.trial import run_attack, try_attack


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("attacks", nargs="+", choices=[*ATTACKS, "all"], metavar="ATTACK", help="or all")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.add_argument("--no-control", action="store_true", help="only against the defended peers")
    options = parser.parse_args()
    names = list(ATTACKS) if "all" in options.attacks else options.attacks
    template, results = Template(), []
    try:
        for name in names:
            if options.no_control:
                began = time.monotonic()
                print(name, try_attack(template, ATTACKS[name]), f"{time.monotonic() - began:.1f} s", flush=True)
                continue
            result = run_attack(template, ATTACKS[name])
            results.append(result)
            if not options.json:
                print(_describe(result), flush=True)
    finally:
        template.close()
    if options.json:
        print(json.dumps([result.to_json() for result in results], indent=1))


def _describe(result: Result) -> str:
    verdict = "holds" if result.defended else "SUCCEEDS"
    counters = ", ".join(f"{name} {count}" for name, count in result.counters.items()) or "no counter"
    control = "the control succeeds" if result.control_succeeds else "the control does NOT succeed"
    return (
        f"{result.attack:24} {verdict:8} loss x{result.loss_ratio:.3g}, pace x{result.pace_ratio:.2f}, "
        f"digests {'equal' if result.digests_equal else 'DIFFER'}, {counters}; {control}"
    )


if __name__ == "__main__":
    main()
