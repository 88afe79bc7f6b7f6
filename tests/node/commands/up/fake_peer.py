"""A fake `murmur join` for the tests of the local swarm: it writes node.json, serves /status and ends at its target.

    fake_peer.py FOLDER EPOCH TARGET [--end CODE] [--ends-at ROUND] [--digest WORD] [--dies-once] [--deaf]
        [--peer ADDRESS]...

Its round is the number of tenths of a second since EPOCH, so a restarted peer is at once at the round of the others.
"""

import argparse
import http.server
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from node.monitoring.status import NodeStatus

SINCE = time.time()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("epoch", type=float)
    parser.add_argument("target", type=int)
    parser.add_argument("--end", type=int, default=0)
    parser.add_argument("--ends-at", type=int)
    parser.add_argument("--digest")
    parser.add_argument("--dies-once", action="store_true")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--peer", action="append", default=[])
    return parser.parse_args()


def status(given: argparse.Namespace) -> NodeStatus:
    present = min(given.target, int((time.time() - given.epoch) * 10))
    return NodeStatus(
        peer_id=f"id-of-{given.folder.name}",
        run="test",
        run_id="00" * 32,
        phase="done" if present >= given.target else "training",
        round=present,
        target_rounds=given.target,
        step=present * 5,
        chain_tokens=present * 1000,
        loss=3.0,
        digest=given.digest or f"{present:064x}",
        peers=sum(alive(file) for file in given.folder.parent.glob("*/node.json")),
        contributions_included=present,
        last_included_round=present - 1,
        bytes_sent=1000,
        seconds={"compute": 3.0, "wait": 1.0},
        since=SINCE,
    )


def alive(file: Path) -> bool:
    try:
        os.kill(json.loads(file.read_text())["pid"], 0)
    except ProcessLookupError:
        return False
    return True


def serve(given: argparse.Namespace) -> int:
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = status(given).model_dump_json().encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])


def announce(given: argparse.Namespace, port: int) -> None:
    values = {
        "pid": os.getpid(),
        "peer_id": given.folder.name,
        "addresses": [f"/to/{given.folder.name}"],
        "metrics_port": port,
    }
    (given.folder / "new").write_text(json.dumps(values))
    (given.folder / "new").rename(given.folder / "node.json")


def main() -> None:
    given = arguments()
    given.folder.mkdir(exist_ok=True)
    ending = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN if given.deaf else lambda *_: ending.set())
    print("introduced by", *given.peer, flush=True)
    announce(given, serve(given))
    if given.dies_once and not (given.folder / "died").exists():
        (given.folder / "died").touch()
        print("what a pity", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    while not ending.wait(0.02) and status(given).round < (given.ends_at or given.target):
        pass
    (given.folder / "status.json").write_text(status(given).model_dump_json())
    if given.end:
        print("murmur: the disk is full; free some space", file=sys.stderr, flush=True)
    sys.exit(given.end)


if __name__ == "__main__":
    main()
