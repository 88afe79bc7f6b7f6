"""Conversations, and a tokenizer with the words that chat templates use."""

import json
from pathlib import Path
from typing import Any

from node.data.tokenizer import byte_tokenizer_json
from tests.node.data.odd_tokenizers import added

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
TALKS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grüße, 世界! 🐦"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "And more?\n\n  yes"},
        {"role": "assistant", "content": "No  more.\n"},
    ],
    [{"role": "user", "content": "Say it"}, {"role": "assistant", "content": "It"}, {"role": "user", "content": "?"}],
]


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer.json of bytes and special words."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [added(256 + number, text) for number, text in enumerate(SPECIAL)]
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(byte_tokenizer_json() | {"added_tokens": words}))
    return path


def write_talks(path: Path, count: int, column: str = "messages") -> Path:
    """Write conversations about numbers as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = (
        [{"role": "user", "content": f"after {n}"}, {"role": "assistant", "content": f"comes {n + 1}"}]
        for n in range(count)
    )
    path.write_text("".join(json.dumps({column: talk}) + "\n" for talk in rows))
    return path
