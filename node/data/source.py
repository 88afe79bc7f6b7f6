"""Open the sources of text that the manifest's [data] table names."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from node.data.chat import LONG_TALK, ChatEncoder, open_encoder
from node.data.conversations import open_conversations
from node.data.corpus import UNCOUNTED, Corpus, SourceText
from node.data.huggingface import open_huggingface
from node.data.questions import open_questions
from node.data.skipped_rows import SkipLog, name_source_faults
from node.data.text_files import open_files
from node.data.token_shards import open_tokens
from node.data.tokenizer import tokenizer_digest
from node.own_loops import NO_DATA
from node.own_tasks import known_tasks
from protocol.errors import DataError
from protocol.manifest.model import ModelSection
from protocol.manifest.sections import DataSection, SourceSection


def open_corpus(data: DataSection, base: Path, modules: Sequence[str] = ()) -> Corpus:
    """Open all sources of text of a run.

    Args:
        base: the manifest's folder, to which paths are relative.
        modules: of the run's own, which may have the task of the source `questions`.

    Raises:
        DataError, MissingFileError: with a message of one line that names the source.
    """
    if data.source == "own":
        raise DataError(NO_DATA)
    log = SkipLog()
    corpus = Corpus(tuple(open_source(source, data, base, log, modules) for source in data.mixture), log)
    require_one_vocabulary({source.config.name: source.vocabulary_size for source in corpus.sources})
    return corpus


def open_source(
    source: SourceSection, data: DataSection, base: Path, log: SkipLog, modules: Sequence[str] = ()
) -> SourceText:
    """Open one source of a run. Raises as `open_corpus`."""
    with name_source_faults(source):
        if source.source == "tokens":
            return open_tokens(source, base, data.validation_share, tokenizer_digest(data.tokenizer, base))
        encoder = open_encoder(data, base)
        if source.source == "questions":
            return open_questions(source, encoder, data.validation_share, known_tasks(modules))
        if isinstance(encoder, ChatEncoder):
            return open_conversations(source, base, encoder, data.validation_share, log)
        open_texts = open_huggingface if source.source == "hf" else open_files
        return open_texts(source, base, encoder, data.validation_share, log)


def require_document_end(model: ModelSection, data: DataSection, base: Path) -> None:
    """Raise DataError if documents do not end with the token that the model takes for their end."""
    if model.document_end is None:
        return
    encoder = open_encoder(data, base)
    end = [token % UNCOUNTED for token in encoder.end.tolist()]
    if not end:
        raise DataError(
            "model.document_end needs a tokenizer with an end-of-text token, which closes each document; name one in "
            "data.tokenizer, or remove model.document_end"
        )
    if end != [model.document_end]:
        raise DataError(
            f"model.document_end is {model.document_end}, but {data.tokenizer} closes documents with token {end[0]}; "
            f"write {end[0]}"
        )
    if isinstance(encoder, ChatEncoder) and end[0] in encoder.encode(json.dumps(LONG_TALK)) % UNCOUNTED:
        raise DataError(
            "data.chat.template writes the token that ends documents within a conversation, which model.document_end "
            "would cut; remove model.document_end"
        )


def require_one_vocabulary(sizes: Mapping[str, int]) -> None:
    """Raise DataError unless all sources, by name, have the same number of token ids."""
    for (first, size), (second, other) in itertools.pairwise(sizes.items()):
        if other != size:
            raise DataError(
                f"source {first} has {size} token ids, source {second} {other}; tokenize all sources with the file "
                "that data.tokenizer names"
            )
