"""Repeat an audited job: `python -m node.daemon.audits FOLDER` prints the result as JSON.

It opens no socket, has a low priority, and ends with the daemon that started it.
"""

import os
import sys
from pathlib import Path

from node.processes.process import LOW_PRIORITY_NICENESS, lower_priority, rare_garbage_collection
from node.trainer.__main__ import die_with_parent


def main(arguments: list[str]) -> int:
    """Repeat one job; returns the exit code."""
    die_with_parent(os.getppid())
    lower_priority(LOW_PRIORITY_NICENESS)
    with rare_garbage_collection():
        import torch

        from node.daemon.audits.repeater import (
            JOB_FILE,
            JobResult,
            Repeater,
            RepeatJob,
            read_anchors,
            read_claimed,
            read_state,
        )
        from node.daemon.audits.work_log import InnerState
        from node.data import open_corpus
        from node.from_manifest import build_program
        from node.model import LanguageModel, build_model
        from node.model.weight_files import read_frozen
        from node.step_settings import StepSettings
        from node.trainer.devices.device import choose_device
        from node.trainer.ipc.shared_memory import SharedLayout
        from protocol.errors import MalformedError, MurmurError
        from protocol.manifest.reading import parse_manifest

    folder = Path(arguments[0])
    job = RepeatJob.model_validate_json((folder / JOB_FILE).read_text(encoding="utf-8"))
    torch.set_num_threads(job.record.conditions.threads)
    manifest, device = parse_manifest(job.manifest.encode(), "the daemon's manifest"), choose_device(job.device)
    planner = build_program(manifest)

    def settings_at(number: int) -> StepSettings:
        return job.settings[number]  # KeyError: an old state

    corpus = open_corpus(manifest.data, Path(job.base), manifest.method.modules)

    def build() -> LanguageModel:
        return build_model(manifest.model, device, frozen=read_frozen(manifest.model, Path(job.base)))

    repeater = Repeater(manifest, planner, corpus, settings_at, build)
    try:
        raw = read_state(folder)
        state = None if raw is None else InnerState.from_bytes(raw, SharedLayout.of(planner))
        work = job.peer, job.record, state, read_anchors(folder, job.record)
        if job.claimed_parts:
            repetition, gap = repeater.measure(*work, read_claimed(folder, job.claimed_parts))
            result = JobResult(repetition=repetition, gap=gap)
        else:
            result = JobResult(repetition=repeater.repeat(*work))
    except MalformedError as error:
        result = JobResult(malformed=str(error))
    except (LookupError, ValueError, OverflowError, MurmurError) as error:
        result = JobResult(obstacle=f"its state cannot be used: {type(error).__name__}")
    print(result.model_dump_json())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
