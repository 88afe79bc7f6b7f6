"""Senders and mergers together: the invariants of whole methods."""

import itertools
from collections.abc import Sequence

import pytest
import torch

from optim.codecs.topk import ChunkTopK
from optim.errors import CodecError
from optim.method import Merger, Method, Sender, part_bounds
from optim.parts import Scalar
from optim.recipes import AGGREGATES, CODECS, RECIPES, UPDATES, compose

NUMEL, PARTS = 9000, 3
LOSSLESS: dict[str, dict[str, Scalar]] = {"codec": {"kind": "none"}}
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


class Replica:
    """One peer's share of a method: anchor, outer state, residual."""

    def __init__(self, method: Method, numel: int = NUMEL) -> None:
        self.method = method
        self.sender, self.merger = Sender(method, numel, PARTS), Merger(method, numel, PARTS)
        self.anchor, self.residual = torch.zeros(numel), torch.zeros(numel)
        self.slots = {name: torch.zeros(numel) for name in method.update.slots}

    def apply(self, messages: Sequence[Sequence[bytes]], weights: Sequence[float]) -> torch.Tensor:
        """Merge as a swarm would, whoever reduces which part, and move the anchor."""
        merger = self.merger
        if self.method.topology == "gather":
            merged = merger.merge([parts[0] for parts in messages], weights)
        else:
            reduced = [
                merger.reduce_part([parts[i] for parts in messages], weights, stop - start)
                for i, (start, stop) in enumerate(merger.bounds)
            ]
            merged = merger.merge(reduced, ())
        self.method.update.apply(self.anchor, self.slots, merged)
        return merged


def draw(seed: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


def decoded(method: Method, payloads: Sequence[bytes], numel: int = NUMEL) -> torch.Tensor:
    spans = method.bounds(numel, PARTS)
    parts = [method.codec.decode(p, stop - start) for p, (start, stop) in zip(payloads, spans, strict=True)]
    return torch.cat(parts)


@pytest.mark.parametrize(("numel", "parts", "alignment"), [(1, 1, 1), (10, 3, 1), (9000, 12, 256), (4097, 3, 4096)])
def test_parts_cover_the_vector_and_start_at_blocks(numel: int, parts: int, alignment: int) -> None:
    bounds = part_bounds(numel, parts, alignment)
    assert bounds[0][0] == 0 and bounds[-1][1] == numel
    assert all(before[1] == after[0] for before, after in itertools.pairwise(bounds))
    assert all(start % alignment == 0 and start < stop for start, stop in bounds)
    sizes = [stop - start for start, stop in bounds]
    assert max(sizes) - min(sizes) <= 2 * alignment
    assert len(bounds) == min(parts, -(-numel // alignment))


def test_parts_of_nothing_are_refused() -> None:
    for numel, parts in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one"):
            part_bounds(numel, parts, 1)


@each_recipe
def test_message_and_residual_hold_all_that_there_was(recipe: str) -> None:
    method = compose(recipe)
    sender, residual = Sender(method, NUMEL, PARTS), draw(0)
    expected = residual * method.feedback.decay + draw(1)
    payloads = sender.message(draw(1), residual)
    assert torch.equal(residual, expected - decoded(method, payloads))
    assert torch.allclose(decoded(method, payloads) + residual, expected, rtol=1e-6, atol=1e-9)


@each_recipe
@pytest.mark.parametrize("feedback", ["error", "none"])
def test_an_excluded_message_is_sent_again(recipe: str, feedback: str) -> None:
    """Of four rounds the second is dropped: what was applied and what is left still sum to all progress made."""
    method = compose(recipe, {"feedback": {"kind": feedback}, "codec": {"kind": "none"}})
    sender, residual, applied = Sender(method, NUMEL, PARTS), torch.zeros(NUMEL), torch.zeros(NUMEL)
    for number in range(4):
        payloads = sender.message(draw(number), residual)
        if number == 1:
            sender.take_back(payloads, residual)
        else:
            applied += decoded(method, payloads)
    decay = method.feedback.decay
    lost = draw(1) * (1 - decay)  # a message that was taken back decays with the residual it joined
    everything = sum((draw(number) for number in range(4)), torch.zeros(NUMEL))
    assert torch.allclose(applied + residual, everything - lost, rtol=1e-5, atol=1e-8)
    # The control: had it not been taken back, the second round would be missing.
    assert not torch.allclose(applied + residual - draw(1), everything - lost, atol=1e-4)


@each_recipe
def test_taking_back_undoes_a_message(recipe: str) -> None:
    method = compose(recipe)
    sender, residual = Sender(method, NUMEL, PARTS), draw(0)
    expected = residual * method.feedback.decay + draw(1)
    sender.take_back(sender.message(draw(1), residual), residual)
    assert torch.allclose(residual, expected, rtol=1e-6, atol=1e-9)


def test_sums_over_rounds_are_the_decayed_sum() -> None:
    method = compose("sparseloco", {"codec": {"k": 16}})
    sender, residual, left = Sender(method, NUMEL, 1), torch.zeros(NUMEL), torch.zeros(NUMEL)
    for number in range(10):
        left = 0.95 * left + draw(number) - 0
        left = left - decoded(method, sender.message(draw(number), residual))
    assert torch.allclose(left, residual, rtol=1e-4, atol=1e-8)


def test_without_error_feedback_most_of_the_mass_is_lost() -> None:
    """A constant pseudo-gradient over 100 rounds of top-k 64 of 4096."""
    constant, sent = draw(5), {}
    for feedback in ("error", "none"):
        method = compose("sparseloco", {"feedback": {"kind": feedback}})
        sender, residual, total = Sender(method, NUMEL, 1), torch.zeros(NUMEL), torch.zeros(NUMEL)
        for _ in range(100):
            total += decoded(method, sender.message(constant, residual))
        sent[feedback] = float(torch.dot(total, constant) / torch.dot(constant, constant)) / 100
    assert sent["error"] > 0.45
    assert sent["none"] < 0.15


def test_a_progress_that_is_not_finite_leaves_the_residual_alone() -> None:
    for recipe in RECIPES:
        residual, delta = draw(0), draw(1)
        delta[-1] = float("nan")
        with pytest.raises(CodecError):
            Sender(compose(recipe), NUMEL, PARTS).message(delta, residual)
        assert torch.equal(residual, draw(0))


@each_recipe
def test_replicas_that_see_the_same_messages_stay_equal(recipe: str) -> None:
    """Twenty rounds with changing members; the replicas run with different numbers of threads."""
    method = compose(recipe)
    replicas = [Replica(method) for _ in range(3)]
    threads = torch.get_num_threads()
    for number in range(20):
        messages = [
            replica.sender.message(draw(10 * number + i), replica.residual) for i, replica in enumerate(replicas)
        ]
        included = [i for i in range(3) if (number + i) % 4]
        for i in set(range(3)) - set(included):
            replicas[i].sender.take_back(messages[i], replicas[i].residual)
        for count, replica in enumerate(replicas, 1):
            torch.set_num_threads(count)
            replica.apply([messages[i] for i in included], [1000.0 + i for i in included])
    torch.set_num_threads(threads)
    assert torch.equal(replicas[0].anchor, replicas[1].anchor) and torch.equal(replicas[0].anchor, replicas[2].anchor)
    assert replicas[0].anchor.abs().max() > 0


@each_recipe
def test_state_survives_a_restart(recipe: str) -> None:
    """The anchor, the slots and the residual are all the state there is."""
    method = compose(recipe)
    one, other = Replica(method), Replica(method)
    one.apply([one.sender.message(draw(0), one.residual)], [1])
    other.anchor, other.residual = one.anchor.clone(), one.residual.clone()
    other.slots = {name: slot.clone() for name, slot in one.slots.items()}
    for replica in (one, other):
        replica.apply([replica.sender.message(draw(1), replica.residual)], [1])
    assert torch.equal(one.anchor, other.anchor) and torch.equal(one.residual, other.residual)


def test_averaging_lands_on_the_mean_of_the_weights() -> None:
    replica = Replica(compose("averaging", LOSSLESS))
    replica.anchor[:] = draw(9)
    weights = [draw(i) for i in range(4)]
    replica.apply([replica.sender.message(draw(9) - weight, torch.zeros(NUMEL)) for weight in weights], [1] * 4)
    assert torch.allclose(replica.anchor, torch.stack(weights).mean(0), rtol=1e-5, atol=1e-8)


def test_keeping_everything_is_diloco_without_momentum() -> None:
    """k = chunk, no decay: the values themselves are what the two levels carry exactly."""
    levels = [torch.sign(draw(i)) * 2.0**-8 for i in range(3)]
    options: dict[str, dict[str, Scalar]] = {"codec": {"k": 4096}, "aggregate": {"clip": False}}
    plain: dict[str, dict[str, Scalar]] = LOSSLESS | {"update": {"learning_rate": 1.0, "momentum": 0.0}}
    results = []
    for method in (compose("sparseloco", options), compose("diloco", plain)):
        replica = Replica(method)
        replica.apply([replica.sender.message(level, torch.zeros(NUMEL)) for level in levels], [1, 2, 3])
        results.append(replica.anchor)
    assert torch.equal(results[0], results[1])


@each_recipe
def test_identical_members_are_one_member(recipe: str) -> None:
    results = []
    for members in (1, 4):
        replica = Replica(compose(recipe))
        message = replica.sender.message(draw(3), replica.residual)
        replica.apply([message] * members, [7.0] * members)
        results.append(replica.anchor)
    assert torch.allclose(results[0], results[1], rtol=1e-5, atol=1e-9)


@each_recipe
def test_reduced_parts_are_near_the_exact_mean(recipe: str) -> None:
    replica = Replica(compose(recipe, {"aggregate": {"clip": False}}))
    messages = [replica.sender.message(draw(i), torch.zeros(NUMEL)) for i in range(3)]
    merged = replica.apply(messages, [1, 2, 5])
    weighted = [decoded(replica.method, message) * weight for message, weight in zip(messages, (1, 2, 5), strict=True)]
    exact = torch.stack(weighted).sum(0) / 8
    assert torch.linalg.vector_norm(merged - exact) < 0.01 * torch.linalg.vector_norm(exact)


@each_recipe
def test_payloads_are_checked_part_by_part(recipe: str) -> None:
    method = compose(recipe)
    merger, payloads = Merger(method, NUMEL, PARTS), Sender(method, NUMEL, PARTS).message(draw(0), torch.zeros(NUMEL))
    assert len(payloads) == len(merger.bounds) == (1 if method.topology == "gather" else PARTS)
    for part, payload in enumerate(payloads):
        merger.check(payload, part)
        with pytest.raises(CodecError):
            merger.check(payload + b"\0", part)


@pytest.mark.parametrize("topology", ["butterfly", "gather"])
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_keeps_replicas_equal_and_conserves_progress(codec: str, topology: str) -> None:
    """Error feedback: what was sent and what is left are all progress made, also after a message was left out."""
    method = compose("averaging", {"codec": {"kind": codec}, "topology": {"kind": topology}})
    replicas = [Replica(method) for _ in range(3)]
    sent = torch.zeros(NUMEL)
    for number in range(4):
        messages = [
            replica.sender.message(draw(10 * number + i), replica.residual) for i, replica in enumerate(replicas)
        ]
        if number == 2:
            replicas[0].sender.take_back(messages[0], replicas[0].residual)
        else:
            sent += decoded(method, messages[0])
        included = messages[number == 2 :]
        for replica in replicas:
            replica.apply(included, [5.0] * len(included))
    made = sum((draw(10 * number) for number in range(4)), torch.zeros(NUMEL))
    assert torch.allclose(sent + replicas[0].residual, made, rtol=1e-4, atol=1e-7)
    assert torch.equal(replicas[0].anchor, replicas[1].anchor) and torch.equal(replicas[0].anchor, replicas[2].anchor)
    assert replicas[0].anchor.abs().max() > 0


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("update", UPDATES)
def test_every_rule_goes_with_every_update(aggregate: str, update: str) -> None:
    method = compose("averaging", {"aggregate": {"kind": aggregate}, "update": {"kind": update}})
    replicas = [Replica(method) for _ in range(2)]
    for number in range(2):
        messages = [replicas[0].sender.message(draw(i + number), torch.zeros(NUMEL)) for i in range(5)]
        for replica in replicas:
            replica.apply(messages, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert torch.equal(replicas[0].anchor, replicas[1].anchor) and replicas[0].anchor.abs().max() > 0


@pytest.mark.parametrize("aggregate", ["median", "trimmed-mean"])
def test_by_coordinate_parts_are_as_good_as_the_whole(aggregate: str) -> None:
    merged = []
    for topology in ("butterfly", "gather"):
        replica = Replica(
            compose("averaging", LOSSLESS | {"aggregate": {"kind": aggregate}} | {"topology": {"kind": topology}})
        )
        messages = [replica.sender.message(draw(i), torch.zeros(NUMEL)) for i in range(5)]
        merged.append(replica.apply(messages, [1.0] * 5))
    assert torch.equal(*merged)


@pytest.mark.parametrize("aggregate", ["krum", "centred-clip"])
def test_rules_on_whole_messages_judge_each_part_of_a_butterfly_apart(aggregate: str) -> None:
    """Each of three liars is loud in one part only. Whole messages would show three of five as liars: too many. A
    part shows one."""
    method = compose("averaging", LOSSLESS | {"aggregate": {"kind": aggregate}})
    replica, truth = Replica(method), draw(0)
    messages = [truth + 0.1 * draw(i + 1) for i in range(5)]
    for liar, (start, stop) in enumerate(replica.merger.bounds):
        messages[liar][start:stop] *= -10
    merged = replica.apply([replica.sender.message(message, torch.zeros(NUMEL)) for message in messages], [1.0] * 5)
    assert torch.linalg.vector_norm(merged - truth) < 0.2 * torch.linalg.vector_norm(truth)


def test_a_merge_of_too_few_parts_is_refused() -> None:
    method = compose("diloco")
    payloads = Sender(method, NUMEL, PARTS).message(draw(0), torch.zeros(NUMEL))
    with pytest.raises(CodecError, match="2 reduced parts where there are 3"):
        Merger(method, NUMEL, PARTS).merge(payloads[:2], ())


def test_rates_that_the_recipes_promise() -> None:
    assert compose("sparseloco").codec.bits_per_parameter(10**6) <= 0.16
    assert compose("diloco").codec.bits_per_parameter(10**6) < 8.1
    assert ChunkTopK(k=512).bits_per_parameter(10**6) < 0.85
