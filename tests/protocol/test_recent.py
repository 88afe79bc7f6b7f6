from protocol.recent import RecentSet, RecentTable


def test_table_drops_the_entry_that_was_set_longest_ago() -> None:
    table = RecentTable[str, int](2)
    table["a"] = table["b"] = 1
    table["a"] = 2
    assert table["b"] == 1  # reading makes no entry newer
    table["c"] = 3
    assert dict(table) == {"a": 2, "c": 3}


def test_table_of_a_full_size_replaces_entries_without_a_loss() -> None:
    table = RecentTable[str, int](2)
    table.update(a=1, b=1)
    table.update(a=2, b=2)
    assert dict(table) == {"a": 2, "b": 2} and len(table) == 2
    assert table.pop("a") == 2 and "a" not in table


def test_set_forgets_members_with_time_and_beyond_its_size() -> None:
    members = RecentSet[str](seconds=10, size=2)
    members.add("a", now=0)
    members.add("b", now=5)
    assert members.members(now=9) == {"a", "b"} and members.members(now=10) == {"b"}
    members.add("b", now=11)
    members.add("c", now=11)
    assert members.members(now=20) == {"b", "c"}
    members.add("d", now=20)
    assert members.members(now=20) == {"c", "d"}
