"""The committed rounds, in chunks that later histories share, so that a round's cost does not grow. Immutable."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

CHUNK_ROWS = 256


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """One committed round; the byte counts are per peer, `seconds` is the time since the previous round.

    `sent_bytes` and the validation losses (of the model after this round) are measured later, or never.
    """

    round: int
    at: float | None
    digest: str
    tokens: int
    loss: float
    contributors: int
    late_count: int
    contribution_bytes: float
    all_reduce_bytes: float
    seconds: float | None
    sent_bytes: float | None = None
    validation_loss: float | None = None
    validation_by_source: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoundHistory:
    """The committed rounds in order; appending copies only the last chunk."""

    chunks: tuple[tuple[RoundSummary, ...], ...] = ()
    tail: tuple[RoundSummary, ...] = ()

    def __len__(self) -> int:
        return len(self.chunks) * CHUNK_ROWS + len(self.tail)

    def __iter__(self) -> Iterator[RoundSummary]:
        for chunk in self.chunks:
            yield from chunk
        yield from self.tail

    @property
    def last(self) -> RoundSummary | None:
        return self.tail[-1] if self.tail else self.chunks[-1][-1] if self.chunks else None

    def recent(self, count: int) -> tuple[RoundSummary, ...]:
        """Return the last `count` rows, limited to the last one to two chunks."""
        return ((*self.chunks[-1], *self.tail) if self.chunks else self.tail)[-count:]

    def append(self, row: RoundSummary) -> "RoundHistory":
        """Return the history with one more row."""
        tail = (*self.tail, row)
        return RoundHistory((*self.chunks, tail), ()) if len(tail) == CHUNK_ROWS else RoundHistory(self.chunks, tail)

    def find(self, round_number: int) -> RoundSummary | None:
        """Return the row of a recent round; `None` if it is unknown or too old."""
        return next((row for row in self.recent(2 * CHUNK_ROWS) if row.round == round_number), None)

    def replace_row(self, row: RoundSummary) -> "RoundHistory":
        """Return the history with `row` in place of the recent row of the same round."""
        tail = tuple(row if old.round == row.round else old for old in self.tail)
        if not self.chunks:
            return RoundHistory((), tail)
        chunk = tuple(row if old.round == row.round else old for old in self.chunks[-1])
        return RoundHistory((*self.chunks[:-1], chunk), tail)

    def truncate_from(self, round_number: int) -> "RoundHistory":
        """Return the history without this round and later ones."""
        kept = [row for row in self if row.round < round_number]
        full = len(kept) - len(kept) % CHUNK_ROWS
        chunks = tuple(tuple(kept[start : start + CHUNK_ROWS]) for start in range(0, full, CHUNK_ROWS))
        return RoundHistory(chunks, tuple(kept[full:]))
