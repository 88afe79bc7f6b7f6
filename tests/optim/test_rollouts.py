"""Public noise: its distribution and its bits; margins and the sum test on distributions made up here."""

import math

import pytest
import torch
from torch import Tensor

from optim.rollouts import SumTest, gumbel_noise, is_exact, margins_of, noise_key, scores_of

IDS = torch.arange(50)


def noise(count: int, vocabulary: int, key: int = 1) -> Tensor:
    return gumbel_noise(torch.full((count,), key), torch.arange(count), torch.arange(vocabulary))


def test_noise_has_the_same_bits_everywhere() -> None:
    found = gumbel_noise(
        torch.tensor([noise_key("run", 3, 5, 7), 0]), torch.tensor([0, 11]), torch.tensor([0, 1, 151_000])
    )
    assert found.view(torch.int32).tolist() == GOLDEN


GOLDEN = [[1076554721, 1064240404, 1049376260], [-1121131440, -1122886686, 1039956490]]


def test_noise_is_its_formula() -> None:
    mask = 2**64 - 1

    def mix(word: int) -> int:
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & mask
        word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
        return word ^ word >> 31

    key, golden = noise_key("run", 4), 0x9E3779B97F4A7C15
    found = gumbel_noise(torch.full((9,), key), torch.arange(9), torch.arange(7))
    for position in range(9):
        row = mix(key + mix(position + golden) & mask)
        for token in range(7):
            uniform = ((mix(row + token * golden & mask) >> 12) + 0.5) * 2.0**-52
            assert float(found[position, token]) == pytest.approx(-math.log(-math.log(uniform)), abs=2e-6)


def test_noise_is_gumbels() -> None:
    values = noise(1000, 1000).double().flatten()
    assert float(values.mean()) == pytest.approx(0.57722, abs=0.01)
    assert float(values.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    for place in (-1.0, 0.0, 1.0, 3.0, 6.0):
        assert float((values <= place).double().mean()) == pytest.approx(math.exp(-math.exp(-place)), abs=0.002)
    assert values.isfinite().all() and len(set(values.tolist())) > 900_000


def test_texts_positions_and_tokens_have_noise_of_their_own() -> None:
    rows = [noise(200, 200, key).flatten() for key in (1, 2, noise_key("a", 1), noise_key("a", 11), noise_key("a1", 1))]
    pairs = [(rows[0][:-200], rows[0][200:]), (rows[0][:-1], rows[0][1:]), *((rows[0], other) for other in rows[1:])]
    for one, other in [*pairs, (rows[2], rows[3]), (rows[3], rows[4])]:
        assert abs(float(torch.corrcoef(torch.stack((one, other)))[0, 1])) < 0.03


def test_key_of_other_parts_is_another() -> None:
    keys = {noise_key("run", 1, 23), noise_key("run", 12, 3), noise_key("run", "1", 23), noise_key("run1", 23)}
    assert len(keys) == 4


def peaky_logits(count: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(count, len(IDS), generator=torch.Generator().manual_seed(seed))


def drawn(logits: Tensor, temperature: float, key: int) -> Tensor:
    rows = gumbel_noise(torch.full((len(logits),), key), torch.arange(len(logits)), IDS)
    return scores_of(logits, temperature, rows).argmax(dim=1)


def test_frequencies_are_those_of_the_softmax() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0]).expand(20_000, -1)
    rows = noise(20_000, 4)
    counts = torch.bincount(scores_of(logits, 0.7, rows).argmax(dim=1), minlength=4) / 20_000
    assert torch.allclose(counts, torch.softmax(logits[0] / 0.7, dim=0), atol=0.015)


def test_honest_text_has_no_margin() -> None:
    logits = peaky_logits(300)
    margins = margins_of(logits, 1.0, 5, drawn(logits, 1.0, 5), IDS)
    assert not margins.any() and is_exact(margins)


def test_each_change_of_the_draw_shows() -> None:
    logits = peaky_logits(300)
    honest = drawn(logits, 1.0, 5)
    edited = honest.clone()
    edited[100] = (edited[100] + 1) % len(IDS)
    changes = {
        "greedy": logits.argmax(dim=1),
        "temperature": drawn(logits, 0.7, 5),
        "key": drawn(logits, 1.0, 6),
        "weights": drawn(logits + 0.3 * peaky_logits(300, 1), 1.0, 5),
        "edited": edited,
    }
    for name, tokens in changes.items():
        assert not is_exact(margins_of(logits, 1.0, 5, tokens, IDS)), name


def test_token_that_may_not_be_drawn_is_never_right() -> None:
    logits, some = peaky_logits(3)[:, ::2], IDS[::2]
    tokens = some[logits.argmax(dim=1)]
    tokens[1] = 1
    assert margins_of(logits, 1.0, 5, tokens, some)[1] == math.inf
    tokens[1] = 10_000
    assert margins_of(logits, 1.0, 5, tokens, some)[1] == math.inf


def test_sum_test_keeps_its_promise_on_honest_rounding() -> None:
    """Logits that differ by rounding: honest texts pass, those of another temperature never."""
    generator = torch.Generator().manual_seed(1)

    def margins(key: int, temperature: float, count: int = 300) -> Tensor:
        logits = peaky_logits(count, key)
        rounded = logits + 0.02 * torch.randn(logits.shape, generator=generator)
        return margins_of(logits, 1.0, key, drawn(rounded, temperature, key), IDS)

    test = SumTest.calibrate(torch.cat([margins(key, 1.0) for key in range(20)]))
    assert sum(not test.accepts(margins(key, 1.0)) for key in range(100, 400)) == 0
    assert sum(test.accepts(margins(key, 0.7)) for key in range(100, 150)) == 0
    for share in test.honest:
        assert share.limit(600, 1e-3) < 2 * share.limit(300, 1e-3), "more tokens know more"


def test_low_caps_find_what_the_highest_does_not() -> None:
    """Many small margins, as of another temperature among few letters, stay below the limit of a high cap."""
    honest = torch.zeros(4000)
    honest[::200] = 0.01
    many_small = torch.zeros(375)
    many_small[::20] = 0.12
    test = SumTest.calibrate(honest)
    highest = SumTest(test.honest[:1])
    assert highest.accepts(many_small)
    assert not test.accepts(many_small)
    assert test.accepts(honest[:375])
