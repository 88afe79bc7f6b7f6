"""Conversations become the ids and masks of transformers and TRL, and templates of strangers reach nothing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from node.data.chat import CHATML, ChatEncoder, ChatTemplate, find_template, read_messages
from node.data.corpus import UNCOUNTED
from node.data.skipped_rows import Fault
from node.data.tokenizer import ByteTokenizer, FileTokenizer
from protocol.errors import DataError, MissingFileError
from protocol.manifest.sections import ChatSection
from tests.node.data.chats import TALKS, write_tokenizer

TRL_TEMPLATES = ("llama3", "qwen3_instruct_2507", "phi3", "gemma")


def encoder(folder: Path, template: str = "") -> ChatEncoder:
    return ChatEncoder(ChatSection(template=template, eos="<|im_end|>"), FileTokenizer(write_tokenizer(folder)))


def theirs(folder: Path, template: str, talk: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(write_tokenizer(folder)), eos_token="<|im_end|>")
    found = tokenizer.apply_chat_template(
        talk, chat_template=template, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    return list(found["input_ids"]), list(found["assistant_masks"])


def ours(made: ChatEncoder, talk: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    tokens = made.encode(json.dumps(talk))
    return (tokens % UNCOUNTED).tolist(), (tokens < UNCOUNTED).astype(int).tolist()


@pytest.mark.parametrize("talk", TALKS)
def test_marked_answers_are_those_of_transformers(tmp_path: Path, talk: list[dict[str, Any]]) -> None:
    found = ours(encoder(tmp_path), talk)
    assert found == theirs(tmp_path, CHATML, talk)
    assert 0 < sum(found[1]) < len(found[1])


@pytest.mark.parametrize("name", TRL_TEMPLATES)
@pytest.mark.parametrize("talk", TALKS)
def test_answers_of_plain_templates_are_those_that_trl_marks(
    tmp_path: Path, talk: list[dict[str, Any]], name: str
) -> None:
    trl = pytest.importorskip("trl")
    folder = Path(trl.__file__).parent / "chat_templates"
    plain, marked = ((folder / f"{name}{kind}.jinja").read_text() for kind in ("", "_training"))
    assert "generation %}" not in plain, "the control: nothing marks the answers"
    talk = [message for message in talk if message["role"] != "system"]  # which Gemma refuses
    found = ours(encoder(tmp_path, plain), talk)
    assert found == theirs(tmp_path, marked, talk)
    assert 0 < sum(found[1]) < len(found[1])


def test_bytes_have_the_mask_of_their_characters() -> None:
    made = ChatEncoder(ChatSection(), ByteTokenizer())
    ids, mask = ours(made, TALKS[1])
    answers = bytes(token for token, counted in zip(ids, mask, strict=True) if counted).decode()
    assert answers == "Hello.<|im_end|>No  more.\n<|im_end|>"
    assert bytes(ids).decode() == made.template.render(TALKS[1]).text


def test_the_prompt_is_what_precedes_the_answer(tmp_path: Path) -> None:
    made = encoder(tmp_path)
    tokens = made.encode(json.dumps(TALKS[0]))
    prompt = made.prompt(TALKS[0][:1])
    assert prompt == (tokens % UNCOUNTED)[: len(prompt)].tolist()
    assert tokens[len(prompt)] < UNCOUNTED <= tokens[len(prompt) - 1]
    assert made.template.end_of_answer == "<|im_end|>"


def test_rewritten_answers_do_not_count() -> None:
    drops_all_but_last = (
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}[{{ m.role }}]{{ m.content }};{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    talk = [message for message in TALKS[1] if message["role"] != "system"]
    rendered = ChatTemplate(ChatSection(template=drops_all_but_last)).render(talk)
    assert [rendered.text[start:stop] for start, stop in rendered.answers] == ["No  more.\n;"]
    assert "Hello." not in rendered.text


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for a in range(10**7) %}x{% endfor %}",
        "{% for a in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ raise_exception('no such role') }}",
        "{{ cycler.__init__.__globals__.os.getpid() }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content.x.y }}",
        "{% include 'run.toml' %}",
    ],
)
def test_a_hostile_template_reaches_nothing(template: str) -> None:
    with pytest.raises(DataError, match="^data.chat.template") as caught:
        ChatTemplate(ChatSection(template=template)).render(TALKS[0])
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


@pytest.mark.parametrize("template", ["{% for %}", "{{ x ", "{% generation %}", "{% unknown %}"])
def test_a_broken_template_is_refused_when_it_is_opened(template: str) -> None:
    with pytest.raises(DataError, match="copy the whole template"):
        ChatTemplate(ChatSection(template=template))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("text", "not a list"),
        ([], "not a list"),
        ([1], "not a table"),
        ([{"content": "x"}], "no role"),
        ([{"role": "user", "content": 4}], "not text"),
        ([{"role": "user", "content": "x"}], "says nothing"),
        ([{"role": "assistant", "content": "\ue000"}], "private area"),
    ],
)
def test_rows_that_are_no_conversation_are_faults(value: object, reason: str) -> None:
    found = ChatEncoder(ChatSection(), ByteTokenizer()).find({"messages": value}, "messages")
    assert isinstance(found, Fault) and reason in found.text


def test_other_names_of_roles_are_read() -> None:
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert read_messages(talk) == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_the_template_of_a_folder_is_found(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no chat template"):
        find_template(tmp_path)
    config = {"chat_template": "old", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert find_template(tmp_path) == ChatSection(template="old", bos="<s>", eos="</s>")
    (tmp_path / "chat_template.jinja").write_text("new")
    assert find_template(tmp_path).template == "new"
    named = config | {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    (tmp_path / "chat_template.jinja").unlink()
    assert find_template(tmp_path).template == "d"


def test_words_of_the_template_are_special_tokens(tmp_path: Path) -> None:
    ids = encoder(tmp_path).encode(json.dumps(TALKS[0])) % UNCOUNTED
    assert np.isin([257, 258], ids).all()
