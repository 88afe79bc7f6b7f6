"""Which experts a peer has trained enough to send them."""

from optim.experts import find_trained
from optim.layout import Layout

LAYOUT = Layout(((2,),) * 9, (0, *(1,) * 4, *(2,) * 4), (-1, 0, 1, 2, 3, 0, 1, 2, 3))


def test_an_expert_is_trained_from_a_quarter_of_the_mean_of_its_layer_on() -> None:
    assert find_trained((100, 24, 26, 250, 1, 1, 1, 0), LAYOUT) == (True, False, True, True, True, True, True, False)


def test_experts_without_tokens_are_not_trained() -> None:
    assert find_trained((0,) * 8, LAYOUT) == (False,) * 8


def test_an_expert_with_few_tokens_is_sent_after_some_rounds() -> None:
    counts, sent = [0] * 8, list[int]()
    for round_number in range(12):
        counts = [count + more for count, more in zip(counts, (98, 5, 98, 98) * 2, strict=True)]
        trained = find_trained(counts, LAYOUT)
        sent += [round_number] * trained[1]
        counts = [0 if is_trained else count for count, is_trained in zip(counts, trained, strict=True)]
    assert sent == [3, 7, 11]
