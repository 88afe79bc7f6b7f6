"""Chunked top-k: the selection, the levels, the size, and a slow decoder written independently of the fast one."""

import struct
from math import lgamma, log

import numpy as np
import numpy.typing as npt
import pytest
import torch

from optim.codecs.bits.gap_coding import class_table, uniform_frequencies
from optim.codecs.topk import COUNTED, UNIFORM, ChunkTopK
from optim.errors import CodecError

Array = npt.NDArray[np.float32]


def slow_classes(count: int, lanes: list[int], frequencies: list[int], stream: list[int]) -> list[int]:
    """Return the symbols; leaves `lanes` in their final state, and in `stream` the words that were not read."""
    classes = []
    for i in range(count):
        lane = lanes[i % len(lanes)]
        slot, symbol = lane % 4096, 0
        while slot >= frequencies[symbol]:
            slot -= frequencies[symbol]
            symbol += 1
        classes.append(symbol)
        lane = frequencies[symbol] * (lane // 4096) + slot
        lanes[i % len(lanes)] = lane if lane >= 2**16 else lane << 16 | stream.pop(0)
    return classes


def slow_decode(codec: ChunkTopK, payload: bytes, numel: int) -> list[float]:
    """Decode value by value as the format is described; raises ValueError if the payload violates it."""
    sizes = [min(codec.chunk, numel - start) for start in range(0, numel, codec.chunk)]
    keeps = [-(-codec.k * size // codec.chunk) for size in sizes]
    number, version, model, words = struct.unpack_from("<BBBI", payload)
    if (number, version) != (4, 2) or model > 1:
        raise ValueError("head")
    lowest, widths = (table.tolist() for table in class_table(sizes[0]))
    position, frequencies = 7, uniform_frequencies(sizes[0], keeps[0]).tolist()
    if model:
        frequencies = list(struct.unpack_from(f"<{len(lowest)}H", payload, position))
        position += 2 * len(lowest)
    if sum(frequencies) != 4096:
        raise ValueError("frequencies")
    per_chunk = 2 ** (codec.bits - 1)
    words_of_levels = struct.unpack_from(f"<{per_chunk * len(sizes)}H", payload, position)
    upper = [struct.unpack("<f", struct.pack("<HH", 0, word))[0] for word in words_of_levels]
    if any(word and not 2.0**-118 <= level <= 2.0**47 for word, level in zip(words_of_levels, upper, strict=True)):
        raise ValueError("levels")
    levels = [upper[first : first + per_chunk] for first in range(0, len(upper), per_chunk)]
    if any(row != sorted(row) for row in levels):
        raise ValueError("levels")
    position += 2 * len(upper)
    count = sum(keeps)
    lane_count = -(-count // 96)
    lanes = list(struct.unpack_from(f"<{lane_count}I", payload, position))
    position += 4 * lane_count
    stream = list(struct.unpack_from(f"<{words}H", payload, position))
    position += 2 * words
    if any(lane < 2**16 for lane in lanes):
        raise ValueError("lane")
    classes = slow_classes(count, lanes, frequencies, stream)
    if stream or any(lane >> 16 != 1 for lane in lanes):
        raise ValueError("end of stream")
    plain = b"".join(struct.pack("<H", lane & 0xFFFF) for lane in lanes) + payload[position:]
    bits = [byte >> shift & 1 for byte in plain for shift in range(7, -1, -1)]
    needed = codec.bits * count + sum(widths[symbol] for symbol in classes)
    if len(plain) != max(-(-needed // 8), 2 * lane_count) or any(bits[needed:]):
        raise ValueError("plain bits")
    decoded, kept, cursor = [0.0] * numel, 0, codec.bits * count
    for chunk, (size, keep) in enumerate(zip(sizes, keeps, strict=True)):
        index = -1
        for _ in range(keep):
            width = widths[classes[kept]]
            index += 1 + lowest[classes[kept]] + int("".join(map(str, bits[cursor : cursor + width])) or "0", 2)
            cursor += width
            if index >= size:
                raise ValueError("index")
            number = sum(bits[plane * count + kept] << plane - 1 for plane in range(1, codec.bits))
            level = levels[chunk][number]
            decoded[chunk * codec.chunk + index] = -level if bits[kept] else level
            kept += 1
    return decoded


def clustered_values(generator: np.random.Generator, chunks: int, k: int) -> Array:
    """Return values whose k largest per chunk are in runs of about eight, at random positions."""
    values = generator.standard_normal((chunks, 4096)).astype(np.float32) * 0.01
    for row in values:
        chosen = np.concatenate([(start + np.arange(8)) % 4096 for start in generator.choice(4096, k, replace=False)])
        row[np.array(list(dict.fromkeys(chosen.tolist()))[:k])] += 100
    return values.ravel()


@pytest.mark.parametrize(
    "codec",
    [
        ChunkTopK(),
        ChunkTopK(k=3, chunk=64),
        ChunkTopK(k=100, chunk=100),
        ChunkTopK(k=20, chunk=100, bits=1),
        ChunkTopK(k=20, chunk=100, bits=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("numel", [1, 3, 63, 64, 100, 8192, 9001])
def test_slow_decoder_agrees(codec: ChunkTopK, numel: int) -> None:
    values = torch.from_numpy(np.random.default_rng(numel).standard_normal(numel, np.float32))
    payload = bytes(codec.encode(values))
    assert codec.decode(payload, numel).tolist() == slow_decode(codec, payload, numel)


@pytest.mark.parametrize(("model", "bits"), [(UNIFORM, 2), (COUNTED, 2), (UNIFORM, 1), (UNIFORM, 3)])
def test_mutated_payloads_are_decoded_as_by_the_slow_decoder_or_refused(model: int, bits: int) -> None:
    codec, generator = ChunkTopK(k=64, chunk=1024, bits=bits), np.random.default_rng(7)
    values = generator.standard_normal(4096, np.float32)
    if model == COUNTED:
        values.reshape(4, 1024)[:, 100:150] *= 50
    payload = codec.encode(torch.from_numpy(values))
    assert payload[2] == model
    accepted = 0
    for _ in range(1000):
        hostile = bytearray(payload)
        for place in generator.integers(2, len(payload), generator.integers(1, 4)):
            hostile[place] ^= 1 << generator.integers(8)
        try:
            fast = codec.decode(bytes(hostile), values.size).tolist()
        except CodecError:
            with pytest.raises((ValueError, IndexError, struct.error)):
                slow_decode(codec, bytes(hostile), values.size)
            continue
        accepted += 1
        assert fast == slow_decode(codec, bytes(hostile), values.size)
    # Signs, magnitudes and levels may change; if those were refused too, this test would show nothing.
    assert accepted > 100


@pytest.mark.parametrize("k", [1, 5, 64, 200, 1024, 4000, 4096])
def test_largest_values_are_kept_and_of_equal_ones_the_first(k: int) -> None:
    generator = np.random.default_rng(k)
    # Few distinct magnitudes: nearly every choice is between equals.
    values = generator.integers(-9, 10, 3 * 4096).astype(np.float32)
    codec = ChunkTopK(k=k)
    positions = codec.decode_vector(codec.encode(torch.from_numpy(values)), values.size).positions.reshape(3, k)
    for row, chunk in enumerate(values.reshape(3, 4096)):
        expected = np.sort(np.argsort(-np.abs(chunk), kind="stable")[:k])
        assert np.array_equal(positions[row] - row * 4096, expected)


def test_levels_are_the_best_split_in_two() -> None:
    values = np.random.default_rng(0).standard_t(3, 4096).astype(np.float32)
    codec = ChunkTopK(k=32)
    vector = codec.decode_vector(codec.encode(torch.from_numpy(values)), 4096)
    kept = np.sort(np.abs(values[vector.positions]))
    error = ((np.abs(vector.values) - np.abs(values[vector.positions])) ** 2).sum()
    best = min(kept[:cut].var() * cut + kept[cut:].var() * (32 - cut) for cut in range(1, 32))
    assert error == pytest.approx(best, rel=1e-3)


def test_values_of_two_levels_are_exact() -> None:
    levels = np.random.default_rng(1).choice(np.array([-3, -0.25, 0.25, 3], np.float32), 4096 + 77)
    codec = ChunkTopK(k=4096)
    assert np.array_equal(codec.decode(codec.encode(torch.from_numpy(levels)), levels.size).numpy(), levels)


@pytest.mark.parametrize(
    ("name", "limits"),
    [("gaussian", (0.16, 0.10, 0.05)), ("laplace", (0.31, 0.16, 0.08)), ("student", (0.8, 0.40, 0.21))],
)
def test_error_of_the_kept_values(name: str, limits: tuple[float, ...]) -> None:
    """The limits are for one, two and three bits."""
    generator, count = np.random.default_rng(3), 256 * 4096
    draws = {
        "gaussian": generator.standard_normal(count),
        "laplace": generator.laplace(size=count),
        "student": generator.standard_t(3, count),
    }
    values = draws[name].astype(np.float32)
    for bits, limit in enumerate(limits, 1):
        codec = ChunkTopK(bits=bits)
        vector = codec.decode_vector(codec.encode(torch.from_numpy(values)), count)
        kept = values[vector.positions]
        assert np.linalg.norm(vector.values - kept) / np.linalg.norm(kept) <= limit


@pytest.mark.parametrize("clustered", [False, True])
@pytest.mark.parametrize("k", [16, 32, 64, 128])
@pytest.mark.parametrize("chunks", [64, 512])
def test_index_coding_is_within_three_percent_of_the_bound(k: int, chunks: int, clustered: bool) -> None:
    generator = np.random.default_rng(k)
    values = (
        clustered_values(generator, chunks, k) if clustered else generator.standard_normal(chunks * 4096, np.float32)
    )
    payload = ChunkTopK(k=k).encode(torch.from_numpy(values))
    bound = chunks * (lgamma(4097) - lgamma(k + 1) - lgamma(4097 - k)) / log(2)
    head_levels_and_values = 8 * 8 + 32 * chunks + 2 * k * chunks
    assert 8 * len(payload) - head_levels_and_values <= 1.03 * bound
    if clustered:  # the entropy coder must benefit; coding each gap by the mean gap alone would not
        assert 8 * len(payload) - head_levels_and_values <= 0.7 * bound


@pytest.mark.parametrize("numel", [64 * 4096, 840_000, 25 * 2**20])
def test_bits_per_parameter_of_the_default(numel: int) -> None:
    assert ChunkTopK().bits_per_parameter(numel) <= 0.16


def forged(field: str) -> bytes:
    """Return a valid payload of 4096 values with one field replaced."""
    payload = bytearray(
        ChunkTopK().encode(torch.from_numpy(np.random.default_rng(2).standard_normal(4096, np.float32)))
    )
    small, large = struct.unpack_from("<HH", payload, 7)
    words = {"nan": 0x7FC0, "infinity": 0x7F80, "minus zero": 0x8000, "negative": small | 0x8000, "huge": 0x5701}
    if field in words:
        struct.pack_into("<H", payload, 7, words[field])
    else:
        struct.pack_into("<HH", payload, 7, *{"levels in the wrong order": (large, small), "tiny": (1, large)}[field])
    return bytes(payload)


@pytest.mark.parametrize(
    "field", ["nan", "infinity", "minus zero", "negative", "huge", "levels in the wrong order", "tiny"]
)
def test_invalid_levels_are_refused(field: str) -> None:
    with pytest.raises(CodecError):
        ChunkTopK().decode_vector(forged(field), 4096)


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_values_subtracted_by_chunk_are_those_that_the_receiver_decodes(bits: int) -> None:
    """Chunks have levels that are far apart, and one has only zeros.

    The test would fail if levels were subtracted as they were fitted, before they are rounded.
    """
    generator = np.random.default_rng(bits)
    values = generator.standard_normal((9, 4096), np.float32) * np.float32(10) ** np.arange(-35, 10, 5)[:, None]
    values[4] = 0
    whole = values.astype(np.float32).ravel()
    left, codec = torch.from_numpy(whole.copy()), ChunkTopK(bits=bits)
    payload = codec.encode_and_subtract(left)
    assert payload == codec.encode(torch.from_numpy(whole))
    decoded = codec.decode(payload, whole.size).numpy()
    assert left.numpy().tobytes() == (whole - decoded).tobytes()
    assert np.count_nonzero(decoded[:4096]) == 64 and not decoded[4 * 4096 : 5 * 4096].any()
