"""Rollouts: texts that a model draws, for people or to learn from. Draws, the test of a claim, and losses.

**Draws.** Gumbel-max sampling with public noise, and the test of a claimed text (Token-DiFR, arXiv 2511.20621).

A token is drawn from softmax(l / T) as the maximum of a score (Gumbel 1954; Maddison et al., arXiv 1411.0030):

    token = argmax_i  l_i / T + g_i,    g_i = -log(-log u_i),    u_i = hash(key, position, i) in (0, 1)

The noise g follows from a public key alone, so nobody who claims a text can choose it: not another temperature, other
weights, or the best of many texts. A trainer has the model and computes the scores of all positions in one pass:

    margin_t = max_i score_i - score_claimed  >= 0,    0 if the claimed token is the one that the noise draws

Devices of one kind compute nearly equal logits, so each margin is 0 or tiny: `is_exact`. Elsewhere logits differ by
rounding, and a near tie may fall to the other side by a small margin. `SumTest` compares the sum of the margins, each
cut at a cap c, with that of honest devices. Bernstein's inequality bounds how often it refuses an honest text of n
tokens whose margins have the mean m and the variance v:

    P(sum >= n m + t)  <=  exp(-t^2 / (2 n v + 2 c t / 3))

A high cap finds few large margins, as of an edited token, and a low one many small margins, as of another temperature:
t must exceed 2 c / 3 times the logarithm, whatever the honest margins are. So the sums of several caps are tested, each
with its share of the false alarms.

The hash is the finaliser of SplitMix64 in wrapping 64-bit integers, and both logarithms are series in fp64 of
additions, multiplications and divisions, which IEEE 754 rounds alike everywhere. So the noise has the same bits on all
processors and cards.

**Losses** for texts that older policies wrote, with a bound on how far the new one may move.

For the token t of a text, with its log probability p_t now, b_t when it was drawn, and the advantage A of its text:

    A = reward - mean reward of the group          (no division by the deviation: arXiv 2503.20783)
    r_t = exp(p_t - b_t)
    loss = 1 / (tokens of all texts)  sum_t  -m_t A r_t + k_t

    dppo    m_t = 0 where the probability has moved by more than 0.2 in the direction of the advantage: exp(p_t) -
            exp(b_t) > 0.2 with A > 0, or < -0.2 with A < 0; k_t = 1e-3 (p_t - b_t)^2. (DPPO with a binary total
            variation, arXiv 2602.04879, as prime-rl uses it.)
    m2po    m_t = 0 for as few tokens as possible, those with the largest (p_t - b_t)^2, so that the mean of it over
            the others is at most 0.04; k_t = 0. (M2PO, arXiv 2510.01161: a second moment bounds the variance of r_t,
            and texts that are hundreds of updates old still teach.)

Scores alone make a policy certain of whatever guess is best while it cannot tell questions apart yet; then nothing else
is drawn, and nothing else is learned. So a run may subtract a small multiple of the mean entropy from either loss: with
the weight h a token whose score is higher by a is at most exp(a / h) times as probable (Williams & Peng 1991).

A group whose rewards are all equal teaches nothing: it is left out and counted. The divisor counts the tokens that
remain, so that a long text weighs as much per token as a short one.

Letters in comments: B texts, T positions, V token ids, N texts, S tokens of all texts.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # constants of SplitMix64 as signed integers
FIRST_FACTOR: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND_FACTOR: Final = 0x94D049BB133111EB - (1 << 64)
FRACTION_BITS: Final = 52  # a half more is still exact in fp64
SERIES_TERMS: Final = 6  # of the logarithm; the rest is below 1e-10
EXACT_MARGIN: Final = 1e-3  # of honest devices of one kind, whose batches may differ
LARGEST_HONEST_MARGIN: Final = 1.0  # of any honest device; rounding moves logits by some hundredths
CAPS: Final = (LARGEST_HONEST_MARGIN, 0.1, 0.03)

LARGEST_MOVE: Final = 0.2
PENALTY: Final = 1e-3
LARGEST_MOMENT: Final = 0.04


def noise_key(*parts: str | int) -> int:
    """Make the key of a text's noise, a signed 64-bit integer, such as `noise_key(run_id, round, group, sample)`."""
    text = "\0".join(f"{type(part).__name__} {part}" for part in ("murmur public noise", *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def gumbel_noise(keys: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Compute the noise (B, V) in fp32 of token ids.

    Args:
        keys: of each row, (B,) int64.
        positions: of the drawn token in each row's text, (B,) int64.
        ids: (V,) int64.
    """
    rows = _mix(keys + _mix(positions + GOLDEN))
    words = _mix(rows[:, None] + ids * GOLDEN)
    uniform = (_shift_right(words, 64 - FRACTION_BITS).double() + 0.5) * 2.0**-FRACTION_BITS
    return -_log(-_log(uniform)).float()


def _mix(words: Tensor) -> Tensor:
    words = (words ^ _shift_right(words, 30)) * FIRST_FACTOR
    words = (words ^ _shift_right(words, 27)) * SECOND_FACTOR
    return words ^ _shift_right(words, 31)


def _shift_right(words: Tensor, count: int) -> Tensor:
    """Move the bits of unsigned words, which torch holds as signed ones."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _log(values: Tensor) -> Tensor:
    """Compute the logarithm of positive fp64 values by the series of artanh, equal to the bit on all machines."""
    mantissa, exponent = torch.frexp(values)
    is_low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(is_low, mantissa * 2, mantissa)
    ratio = (mantissa - 1) / (mantissa + 1)
    square, total = ratio * ratio, torch.zeros_like(ratio)
    for term in reversed(range(SERIES_TERMS)):
        total = total * square
        total = total + 1 / (2 * term + 1)
    return (exponent - is_low.int()).double() * math.log(2) + ratio * 2 * total


def scores_of(logits: Tensor, temperature: float, noise: Tensor) -> Tensor:
    """Add the noise to logits of the same shape, in fp32 and in this order everywhere."""
    return logits.float() / temperature + noise


def scores_of_text(logits: Tensor, temperature: float, key: int, ids: Tensor) -> Tensor:
    """Score all `ids` at each position of one text by the noise of its key, (T, V); for arguments see `margins_of`."""
    positions = torch.arange(len(logits), device=logits.device)
    return scores_of(logits, temperature, gumbel_noise(torch.full_like(positions, key), positions, ids))


def margins_of(logits: Tensor, temperature: float, key: int, tokens: Tensor, ids: Tensor) -> Tensor:
    """Compute how far each claimed token is below the one that the noise draws, (T,) in units of noise.

    Args:
        logits: before each claimed token, of `ids` alone, (T, V).
        key: of the text's noise.
        tokens: the claimed ones, (T,) int64.
        ids: the tokens that may be drawn, (V,) int64, ascending. Another token has an infinite margin.
    """
    scores = scores_of_text(logits, temperature, key, ids)
    places = torch.searchsorted(ids.contiguous(), tokens).clamp(max=len(ids) - 1)
    claimed = scores.gather(1, places[:, None])[:, 0]
    return torch.where(ids[places] == tokens, scores.amax(dim=1) - claimed, math.inf)


def is_exact(margins: Tensor) -> bool:
    """Check a text that a device of the same kind claims.

    A single margin above rounding proves that the text was not drawn by its noise from this model.
    """
    return bool((margins <= EXACT_MARGIN).all())


class HonestShare(NamedTuple):
    """Mean and variance of honest margins, each cut at `cap`."""

    cap: float
    mean: float
    variance: float

    def limit(self, count: int, false_alarms: float) -> float:
        """Compute the largest sum of the cut margins of an honest text of `count` tokens (Bernstein's inequality)."""
        need, spread = -math.log(false_alarms), count * self.variance
        linear = self.cap * need / 3
        return count * self.mean + linear + math.sqrt(linear * linear + 2 * spread * need)


@dataclass(frozen=True)
class SumTest:
    """The test of texts from devices of other kinds, by the sums of their margins at each of `CAPS`."""

    honest: tuple[HonestShare, ...]
    false_alarms: float = 1e-3

    @classmethod
    def calibrate(cls, honest: Tensor, times: float = 1.0, false_alarms: float = 1e-3) -> Self:
        """Estimate mean and variance from margins (T,) of honest texts, with one more margin at the cap.

        The additional one keeps the test from expecting that rare near ties never occur.

        Args:
            times: factor of the mean and the variance that are allowed.
        """
        shares = list[HonestShare]()
        for cap in CAPS:
            kept = torch.cat((honest.double().clamp(max=cap), honest.new_full((1,), cap, dtype=torch.float64)))
            shares.append(HonestShare(cap, times * float(kept.mean()), times * float(kept.var(correction=0))))
        return cls(tuple(shares), false_alarms)

    def accepts(self, margins: Tensor) -> bool:
        """Check the margins (T,) of one text, or of all texts of a peer; none may exceed `LARGEST_HONEST_MARGIN`."""
        alarms = self.false_alarms / len(self.honest)
        values = margins.double()
        return bool((values <= LARGEST_HONEST_MARGIN).all()) and all(
            float(values.clamp(max=share.cap).sum()) <= share.limit(len(values), alarms) for share in self.honest
        )


class Advantages(NamedTuple):
    """The advantage of each text (N,), fp32, 0 in the groups that are left out, and how many these are."""

    values: Tensor
    skipped_groups: int


@dataclass(frozen=True)
class PolicyMetrics:
    """How far the policy is from the one that wrote the texts.

    Attributes:
        mismatch_kl: mean of r - log r - 1, an estimate of the KL divergence in nats per token.
        effective_samples: (sum r)^2 / (n sum r^2), the share of tokens that count; 1 for the same policy.
        clipped: share of tokens with m = 0.
        tokens: that the loss is divided by.
    """

    mismatch_kl: float
    effective_samples: float
    clipped: float
    tokens: int


def centre_rewards(rewards: Tensor, groups: Sequence[int]) -> Advantages:
    """Subtract from each reward (N,) the mean of its group; `groups` has the number of each text's group."""
    numbers, places, counts = torch.unique(torch.tensor(groups), return_inverse=True, return_counts=True)
    exact = rewards.double()
    means = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, places, exact) / counts
    advantages = exact - means[places]
    largest = torch.zeros(len(numbers), dtype=torch.float64).scatter_reduce_(0, places, advantages.abs(), "amax")
    is_flat = largest <= 1e-9  # a mean of equal rewards may differ from them by rounding
    return Advantages(advantages.masked_fill(is_flat[places], 0.0).float(), int(is_flat.sum()))


def dppo(log_probabilities: Tensor, behaviour: Tensor, advantages: Tensor) -> tuple[Tensor, PolicyMetrics]:
    """Compute the loss of tokens (S,) of all texts together, and its metrics.

    Args:
        log_probabilities: of the tokens now, in nats, with a gradient.
        behaviour: the same when they were drawn, as the sampler reported them.
        advantages: of each token's text; tokens of texts that were left out are not among them.
    """
    with torch.no_grad():
        moved = (log_probabilities.exp() - behaviour.exp()) * advantages.sign()
        kept = moved <= LARGEST_MOVE
    log_ratio = log_probabilities - behaviour
    terms = PENALTY * log_ratio.square() - kept * advantages * log_ratio.exp()
    return terms.sum() / len(terms), _measure(log_ratio, kept)


def m2po(log_probabilities: Tensor, behaviour: Tensor, advantages: Tensor) -> tuple[Tensor, PolicyMetrics]:
    """Compute the loss of tokens (S,) of all texts together, and its metrics; see `dppo`."""
    log_ratio = log_probabilities - behaviour
    kept = keep_small_moment(log_ratio.detach())
    return -(kept * advantages * log_ratio.exp()).sum() / len(kept), _measure(log_ratio, kept)


def mean_entropy(logits: Tensor, temperature: float) -> Tensor:
    """Compute the mean entropy in nats of the draws at logits (S, V) at a temperature."""
    log_probabilities = torch.log_softmax(logits / temperature, dim=-1)
    return -(log_probabilities.exp() * log_probabilities).sum(dim=-1).mean()


def keep_small_moment(log_ratio: Tensor) -> Tensor:
    """Mark all tokens but the fewest whose removal brings the mean square of the others to at most the bound; (S,)."""
    squares, order = log_ratio.double().square().sort()
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, device=squares.device)
    kept = torch.zeros_like(log_ratio, dtype=torch.bool)
    kept[order] = means <= LARGEST_MOMENT  # means of ascending values ascend
    return kept


def _measure(log_ratio: Tensor, kept: Tensor) -> PolicyMetrics:
    exact = log_ratio.detach().double()
    ratio = exact.exp()
    return PolicyMetrics(
        mismatch_kl=float((ratio - exact - 1).mean()),
        effective_samples=float(ratio.sum().square() / (len(ratio) * ratio.square().sum())),
        clipped=1.0 - float(kept.double().mean()),
        tokens=len(kept),
    )


PolicyLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, PolicyMetrics]]
POLICY_LOSSES: Final[dict[str, PolicyLoss]] = {"dppo": dppo, "m2po": m2po}  # each has a trust region
