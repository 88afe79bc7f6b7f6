"""The process of an audit: `python -m node.audits FOLDER` repeats the job in a folder and prints its result as JSON.

It opens no socket, has a low priority, and dies with the daemon that started it.
"""

import os
import sys
from pathlib import Path

from node.process import LOW_PRIORITY_NICENESS, lower_priority, rare_garbage_collection
from node.trainer.__main__ import die_with_parent


def main(arguments: list[str]) -> int:
    """Repeat one job; returns the exit code."""
    die_with_parent(os.getppid())
    lower_priority(LOW_PRIORITY_NICENESS)
    with rare_garbage_collection():
        import torch

        from node.audits.inner_state import InnerState
        from node.audits.job import JOB_FILE, JobResult, RepeatJob, read_anchors, read_state
        from node.audits.repeater import Repeater
        from node.data import open_source
        from node.from_manifest import build_program
        from node.ipc.shared_memory import SharedLayout
        from node.model import build_model
        from node.trainer.device import choose_device
        from protocol.errors import MalformedError, MurmurError
        from protocol.manifest import Manifest, parse_manifest

    folder = Path(arguments[0])
    job = RepeatJob.model_validate_json((folder / JOB_FILE).read_text(encoding="utf-8"))
    torch.set_num_threads(job.record.conditions.threads)
    manifest, device = parse_manifest(job.manifest.encode(), "the daemon's manifest"), choose_device(job.device)
    planner = build_program(manifest)

    def manifest_at(number: int) -> Manifest:
        return manifest.model_copy(update={"train": job.trains[number]})  # KeyError: a state of long ago

    corpus = open_source(manifest.data, Path(job.base))
    repeater = Repeater(planner, corpus, manifest_at, lambda: build_model(manifest.model, device))
    try:
        raw = read_state(folder)
        state = None if raw is None else InnerState.from_bytes(raw, SharedLayout.of(planner))
        repetition = repeater.repeat(job.peer, job.record, state, read_anchors(folder, job.record))
        result = JobResult(repetition=repetition)
    except MalformedError as error:
        result = JobResult(malformed=str(error))
    except (LookupError, ValueError, OverflowError, MurmurError) as error:
        result = JobResult(obstacle=f"its state cannot be used: {type(error).__name__}")
    print(result.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
