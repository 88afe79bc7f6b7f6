import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from optim.kernels import code_cache
from optim.kernels.code_cache import LEVEL_FEATURES, cache_dirs, highest_level, source_digest
from optim.kernels.jit import jit

Floats = npt.NDArray[np.float32]


def doubled(values: Floats) -> None:
    for i in range(values.size):
        values[i] *= np.float32(2)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory that code is looked for in."""
    directory = tmp_path / "code"
    monkeypatch.setattr(code_cache, "cache_dirs", lambda source: iter([directory]))
    code_cache._warn_once.cache_clear()
    return directory


def run() -> Any:
    """`doubled`, compiled or loaded by a process that has not seen it yet."""
    loop: Any = jit(doubled)
    values = np.arange(5, dtype=np.float32)
    loop(values)
    assert values.tolist() == [0, 2, 4, 6, 8]
    return loop


def is_loaded_from_cache(loop: Any) -> bool:
    return not loop.made


def test_code_is_compiled_once_for_all_who_come_after(place: Path) -> None:
    assert not is_loaded_from_cache(run())
    assert is_loaded_from_cache(run())
    (file,) = place.iterdir()
    assert file.stat().st_mode & 0o044  # others may read it: an image is made by another user


@pytest.mark.parametrize("harm", [lambda code: b"", lambda code: code[:-1], lambda code: code[:99] + b"x" + code[100:]])
def test_damaged_code_is_compiled_anew(
    place: Path, harm: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    run()
    (file,) = place.iterdir()
    file.write_bytes(harm(file.read_bytes()))
    assert not is_loaded_from_cache(run())
    assert "damaged" in caplog.text
    assert len(file.read_bytes()) > 500 and is_loaded_from_cache(run())


def test_where_nothing_can_be_written_each_process_compiles(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    place.write_text("not a directory")
    assert not is_loaded_from_cache(run()) and not is_loaded_from_cache(run())
    assert [record.levelno for record in caplog.records] == [logging.WARNING]  # said once
    assert str(place) in caplog.text


def test_code_is_read_where_it_cannot_be_written_and_else_kept_in_the_next_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, own = tmp_path / "closed", tmp_path / "own"
    monkeypatch.setattr(code_cache, "cache_dirs", lambda source: iter([closed, own]))
    closed.write_text("not a directory")
    run()
    assert len(list(own.iterdir())) == 1
    closed.unlink()
    own.rename(closed)
    assert is_loaded_from_cache(run()) and not own.exists()


def test_code_of_other_sources_is_not_used_and_goes(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(code_cache, "PACKAGE", package)
    try:
        for text in ("one", "two"):
            (package / "helper.py").write_text(text)
            source_digest.cache_clear()
            assert not is_loaded_from_cache(run()) and is_loaded_from_cache(run())
            assert len(list(place.iterdir())) == 1
    finally:
        source_digest.cache_clear()


def test_places_are_the_sources_neighbour_and_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a.py"
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert list(cache_dirs(source)) == [tmp_path / "__pycache__", tmp_path / "cache" / "murmur"]
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "given"))
    assert next(cache_dirs(source)) == tmp_path / "given"


def test_levels_are_those_that_a_processor_has_in_full() -> None:
    second, third, fourth = LEVEL_FEATURES.values()
    assert highest_level(set()) is None
    assert highest_level(second | {"sse4a"}) == "x86-64-v2"
    assert highest_level(second | third | {"avx512f"}) == "x86-64-v3"
    assert highest_level(second | third | fourth) == "x86-64-v4"
    assert highest_level(third | fourth) is None


def test_processes_that_compile_at_the_same_time_do_not_harm_each_other(tmp_path: Path) -> None:
    (tmp_path / "halving.py").write_text(
        "import sys\n"
        "import numpy as np\n"
        "from optim.kernels.jit import compiled\n"
        "@compiled\n"
        "def halve(values) -> None:\n"
        "    for i in range(values.size):\n"
        "        values[i] /= 2\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "for kind in (np.float32, np.float64):\n"
        "    values = np.arange(4).astype(kind)\n"
        "    halve(values)\n"
        "    assert values.tolist() == [0, 0.5, 1, 1.5]\n"
        "print(halve.made)\n"
    )
    command = [sys.executable, "-W", "error", str(tmp_path / "halving.py")]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:
        for process in (one, other):
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in (one, other):
            process.communicate("go\n", timeout=120)
    assert (one.returncode, other.returncode) == (0, 0)
    files = list((tmp_path / "__pycache__").glob("halving-*"))
    assert len(files) == 2 and all(file.suffix == ".loop" for file in files)
    after = subprocess.run(command, input="go\n", capture_output=True, text=True, check=True, timeout=120)
    assert after.stdout.split() == ["ready", "0"]


def test_whoever_finds_its_code_loads_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("")
    call = "vectors._add_squares(numpy.ones(3, 'f'), numpy.zeros(3)); print('numba' in sys.modules)"
    known = f"import sys, numpy; from optim import vectors; {call}"
    anew = f"from optim import machine_code as code; code.PACKAGE = code.Path('{tmp_path}'); {known}"
    told = []
    for program in (known, known, anew, anew):
        command, own = [sys.executable, "-c", program], os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        told.append(subprocess.run(command, env=own, capture_output=True, text=True, check=True, timeout=120).stdout)
    assert told[1:] == ["False\n", "True\n", "False\n"]
