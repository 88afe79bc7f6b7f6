"""The line of a peer that is back."""

from node.monitoring.status_reporter import ReturnSummary


def test_line_names_the_rounds_and_the_contributions() -> None:
    summary = ReturnSummary(30)
    summary.add("none")
    summary.add("included", 40)
    summary.add("excluded")
    assert summary.describe(42) == (
        "back after 12 rounds: 1 contribution included in round 40, 1 given back; later ones carry their work"
    )


def test_line_without_contributions_and_of_a_newcomer() -> None:
    assert ReturnSummary(30).describe(30) == ""
    assert ReturnSummary(30).describe(31) == "back after 1 round"
    assert ReturnSummary(0).describe(42) == "caught up with round 42"


def test_switch_to_another_chain_of_the_same_length_is_told() -> None:
    summary = ReturnSummary(30)
    summary.add("excluded")
    assert "1 given back" in summary.describe(30)


def test_only_an_unknown_outcome_is_called_unknown_and_none_is_called_lost() -> None:
    summary = ReturnSummary(30)
    for outcome in ("included", "excluded", "lost"):
        summary.add(outcome)
    line = summary.describe(31)
    assert "1 contribution included, 1 given back" in line and "1 with an unknown outcome" in line
    assert "lost" not in line
