"""`murmur chat`: conversations with small models, in this process and in a terminal of their own."""

import io
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from node.commands.chat import ChatModel, Conversation, talk
from node.daemon.checkpoints.checkpoint import Checkpoint, SavedChain, save
from node.data.chat import CHATML, Message
from node.data.tokenizer import FileTokenizer
from node.model import shape_table
from node.model.generate import Sampling, until
from node.model.opened_model import open_folder
from protocol.errors import MissingFileError, UsageError
from protocol.manifest.run import Manifest
from tests.node.data.chats import write_tokenizer

torch.set_num_threads(1)
GREEDY = Sampling(0.0)


def write_run(folder: Path, chat: bool = True) -> Path:
    """Write a node's folder with a random model of conversations."""
    tokenizer = write_tokenizer(folder)
    data = {"source": "text", "path": "talks.jsonl", "tokenizer": tokenizer.name, **({"chat": {}} if chat else {})}
    run = Manifest.model_validate(
        {
            "run": {"name": "talk"},
            "model": {"vocabulary": 262, "width": 16, "layers": 1, "heads": 2, "hidden": 16, "context": 128},
            "data": data,
            "train": {"batch_tokens": 128, "learning_rate": 0.1},
            "method": {"recipe": "diloco"},
        }
    )
    (folder / "run.toml").write_text(run.to_toml())
    shapes = shape_table(run.model)
    weights = torch.randn(shapes.numel, generator=torch.Generator().manual_seed(1)) / 4
    checkpoint = Checkpoint(run.run_id, shapes.hash(), 1, bytes(32), SavedChain({}, b""), weights, {}, {}, {})
    save(folder / "checkpoints", checkpoint, shapes, keep=1)
    return folder


def conversation(folder: Path, tokens: int = 20) -> Conversation:
    return Conversation(ChatModel.of(open_folder(folder), str(folder)), tokens, GREEDY)


def test_answer_is_the_continuation_of_the_templates_text(tmp_path: Path) -> None:
    talking = conversation(write_run(tmp_path))
    said = "".join(talking.ask("Hi"))
    generator = talking.model.generator
    asked = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    start = FileTokenizer(tmp_path / "tokenizer.json").encode_with_places(asked)[0].tolist()
    assert said and said == "".join(generator.continue_tokens(start, 20, GREEDY))
    assert [message["role"] for message in talking.messages] == ["user", "assistant"]
    assert talking.messages[1]["content"] == said


def test_text_that_ends_an_answer_ends_it_wherever_it_is_cut() -> None:
    assert "".join(until(["ab<", "|e", "nd|", ">cd"], ["<|end|>"])) == "ab"
    assert list(until(["a<", "b", "<|"], ["<|end|>"])) == ["a", "<b", "", "<|"], "no text is lost, or late for long"
    assert "".join(until(iter("abc"), [])) == "abc"


def test_long_conversation_forgets_its_beginning(tmp_path: Path) -> None:
    talking = conversation(write_run(tmp_path))
    for number in range(8):
        list(talking.ask(f"question {number}"))
    assert talking.messages[-2]["content"] == "question 7"
    assert talking.messages[0]["content"] != "question 0" and talking.messages[0]["role"] == "user"
    before = list(talking.messages)
    with pytest.raises(UsageError, match="do not fit the model's context of 128; write less"):
        talking.ask("long " * 100)
    assert talking.messages == before


def test_lines_are_answered_and_faults_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talking, out = conversation(write_run(tmp_path)), io.StringIO()
    talk(talking, iter(["Hi\n", "\n", "x" * 500 + "\n", "/new\n"]), out)
    assert out.getvalue().endswith("\n") and not talking.messages
    assert re.fullmatch(r"murmur: \d+ tokens do not fit [^\n]*; write less\n", capsys.readouterr().err)


class InterruptedOut(io.StringIO):
    """A person presses Ctrl-C while the first piece is written."""

    def write(self, text: str) -> int:
        if not self.getvalue():
            super().write(text)
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_stops_the_answer_alone(tmp_path: Path) -> None:
    talking, out = conversation(write_run(tmp_path), tokens=10_000), InterruptedOut()
    talk(talking, iter(["Hi"]), out)
    assert talking.messages[-1]["role"] == "assistant" and len(talking.messages[-1]["content"]) < 100


def test_ctrl_c_before_the_first_piece_ends_the_answer_and_not_the_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talking, out, began = conversation(write_run(tmp_path), tokens=3), io.StringIO(), Conversation._begin
    impatient = iter([True, False])

    def begin(self: Conversation, messages: list[Message]) -> Iterator[str]:
        if next(impatient):
            raise KeyboardInterrupt
        return began(self, messages)

    monkeypatch.setattr(Conversation, "_begin", begin)
    talk(talking, iter(["Hi", "Hello"]), out)
    assert [message["content"] for message in talking.messages][0] == "Hello" and len(talking.messages) == 2


def test_models_without_a_template_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", chat=False)
    with pytest.raises(UsageError, match="no conversations .*; use `murmur generate`"):
        conversation(run)
    from node.model.export import export

    export(run, tmp_path / "out")
    with pytest.raises(MissingFileError, match="no chat template"):
        conversation(tmp_path / "out")
    (tmp_path / "out" / "chat_template.jinja").write_text(
        CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    )
    assert "".join(conversation(tmp_path / "out").ask("Hi")) == "".join(
        conversation(write_run(tmp_path / "b")).ask("Hi")
    )


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run the command in a terminal of its own."""
    master, slave = pty.openpty()
    words = [sys.executable, "-m", "node.cli", "chat", str(write_run(tmp_path)), "--tokens", "100000"]
    process = subprocess.Popen(
        words, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env={**os.environ, "TERM": "dumb"},
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    yield process, master
    process.kill()
    process.wait()
    os.close(master)


def read_until(master: int, wanted: bytes, seconds: float = 60.0) -> bytes:
    seen, deadline = b"", time.monotonic() + seconds
    while wanted not in seen:
        assert time.monotonic() < deadline, seen
        try:
            seen += os.read(master, 4096)
        except OSError:  # the other side has closed the terminal
            break
    return seen


@pytest.mark.timeout(180)
def test_terminal_streams_an_answer_and_ends_cleanly(terminal: tuple[subprocess.Popen[bytes], int]) -> None:
    process, master = terminal
    read_until(master, b"> ")
    os.write(master, b"Hello\n")
    read_until(master, b"Hello")
    assert os.read(master, 64), "the answer arrives while it is being written"
    os.write(master, b"\x03")  # Ctrl-C: the answer ends
    read_until(master, b"> ")
    os.write(master, b"\x04")  # Ctrl-D
    rest = read_until(master, b"no such text")
    assert process.wait(30) == 0
    assert b"Traceback" not in rest


def test_questions_from_a_file(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "node.cli", "chat", str(write_run(tmp_path)), "--tokens", "5"]
    done = subprocess.run(words, input=b"One\nTwo\n", capture_output=True, timeout=120)
    assert done.returncode == 0 and not done.stderr and done.stdout.count(b"\n") >= 2
