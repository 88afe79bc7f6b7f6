"""What others use, from a made-up /proc and from the real one."""

import time
from pathlib import Path

import pytest

from node.trainer.devices.pause_when_busy import CpuMeter
from protocol.errors import DeviceError

TRAINER = b"python\0-m\0node.trainer\x005\0"
RANK = b"python\0-m\0node.trainer.ranks\x005\0"  # a child of a trainer


class FakeProc:
    """A /proc of four processors, whose counters a test moves on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.busy = 1000
        self.idle = 5000
        self.write_total()

    def write_total(self) -> None:
        (self.folder / "stat").write_text(f"cpu  {self.busy} 0 0 {self.idle} 0 0 0 0 0 0\ncpu0 0 0 0 0\n")

    def process(self, pid: int, parent: int, ticks: int, words: bytes = b"x\0", started: int = 7) -> None:
        entry = self.folder / str(pid)
        entry.mkdir(exist_ok=True)
        fields = ["S", str(parent), *["0"] * 9, str(ticks), "0", *["0"] * 6, str(started), "0"]
        (entry / "stat").write_text(f"{pid} (a name) with) {' '.join(fields)}\n")
        (entry / "cmdline").write_bytes(words)

    def spend(self, busy: int, idle: int) -> None:
        self.busy = self.busy + busy
        self.idle = self.idle + idle
        self.write_total()


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    made = FakeProc(tmp_path)
    made.process(1, 0, 50)
    made.process(10, 1, 0, b"murmur\0join\0")
    made.process(11, 10, 0, TRAINER)
    made.process(12, 10, 0, b"p2pd\0")
    made.process(90, 1, 0, b"game\0")
    return made


def test_our_own_work_is_not_that_of_others(proc: FakeProc) -> None:
    proc.process(13, 11, 0, RANK)
    meter = CpuMeter(proc.folder)
    assert meter.measure_share() is None
    proc.process(10, 1, 10)
    proc.process(11, 10, 180, TRAINER)
    proc.process(12, 10, 10)
    proc.process(13, 11, 100, RANK)
    proc.spend(busy=300, idle=100)
    assert meter.measure_share() == 0.0


def test_that_of_others_is_their_share_of_all_processors(proc: FakeProc) -> None:
    meter = CpuMeter(proc.folder)
    meter.measure_share()
    proc.process(11, 10, 200, TRAINER)
    proc.spend(busy=300, idle=100)
    assert meter.measure_share() == 0.25
    proc.spend(busy=0, idle=400)
    assert meter.measure_share() == 0.0


def test_another_node_on_this_machine_is_not_another(proc: FakeProc) -> None:
    """And the control: the same time spent by any other program is."""
    meter = CpuMeter(proc.folder)
    proc.process(20, 1, 0, b"murmur\0join\0")
    proc.process(21, 20, 0, TRAINER)
    meter.measure_share()
    proc.process(21, 20, 400, TRAINER)
    proc.spend(busy=400, idle=0)
    assert meter.measure_share() == 0.0
    proc.process(90, 1, 400, b"game\0")
    proc.spend(busy=400, idle=0)
    assert meter.measure_share() == 1.0


def test_a_number_that_another_process_has_taken_over(proc: FakeProc) -> None:
    meter = CpuMeter(proc.folder)
    meter.measure_share()
    proc.process(11, 1, 390, b"game\0", started=99)
    proc.spend(busy=400, idle=0)
    assert meter.measure_share() == 1.0


def test_without_proc_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="leave it out"):
        CpuMeter(tmp_path)


def test_the_real_one_knows_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two meters over the same time, one of which takes us for a stranger."""

    class Stranger(CpuMeter):
        def _is_trainer(self, pid: int) -> bool:
            return False

    ours, strangers = CpuMeter(), Stranger()
    ours.measure_share(), strangers.measure_share()
    ends = time.process_time() + 0.5
    while time.process_time() < ends:
        pass
    one, other = ours.measure_share(), strangers.measure_share()
    assert one is not None and other is not None and 0 <= one < other <= 1
