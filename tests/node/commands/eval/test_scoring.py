"""Scores of tokens against a slow computation, one sequence at a time."""

import torch

from node.commands.eval.scoring import Scorer
from node.model import build_model
from node.trainer.inner_step import validation_loss
from tests.node.model.test_export import manifest

torch.set_num_threads(1)


def scorer(batch: int = 3) -> Scorer:
    model = build_model(manifest().model)
    model.load_flat(torch.randn(model.flat.numel(), generator=torch.Generator().manual_seed(3)) / 4)
    return Scorer(model, batch)


def test_scores_are_those_of_the_validation_loss() -> None:
    own, windows = scorer(), torch.randint(256, (7, 17), generator=torch.Generator().manual_seed(1))
    scores = own.score(windows)
    expected, _ = validation_loss(own.model, own.model.flat, [windows[:4], windows[4:]])
    assert torch.isclose(-scores.log_probabilities.mean(), torch.tensor(expected), rtol=1e-5)
    likeliest = own.model(windows[:, :-1]).argmax(-1)
    assert torch.equal(scores.is_likeliest, likeliest == windows[:, 1:])


def test_continuations_have_the_same_scores_in_any_batch_and_alone() -> None:
    """A padded row must not change a score, and a long context loses its beginning."""
    own, generator = scorer(), torch.Generator().manual_seed(2)
    lengths = ((1, 1), (5, 3), (12, 4), (40, 2), (2, 15), (16, 1))
    drawn = [torch.randint(256, (sum(pair),), generator=generator).tolist() for pair in lengths]
    pairs = [(tokens[:before], tokens[before:]) for tokens, (before, _) in zip(drawn, lengths, strict=True)]
    together = list(own.score_continuations(pairs))
    for (context, chosen), (found, _) in zip(pairs, together, strict=True):
        row = torch.tensor((context + chosen)[-17:])
        logits = own.model(row[None, :-1])[0].detach().log_softmax(-1)
        expected = sum(float(logits[place - 1, row[place]]) for place in range(len(row) - len(chosen), len(row)))
        assert abs(found - expected) < 1e-4


def test_likeliest_continuation_is_found() -> None:
    own = scorer()
    first = int(own.model(torch.tensor([[7, 8]]))[0, -1].argmax())
    second = int(own.model(torch.tensor([[7, 8, first]]))[0, -1].argmax())
    flags = [flag for _, flag in own.score_continuations([([7, 8], [first, second]), ([7, 8], [first, second ^ 1])])]
    assert flags == [True, False]
