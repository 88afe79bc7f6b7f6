from node.monitoring.logs import sanitize

FORGED = "x\n12:00:00 error: forged\x1b[2J\r\x00\u202e\x9b\u2028ok"


def test_sanitize_replaces_unprintable_characters() -> None:
    assert sanitize(FORGED) == "x\ufffd12:00:00 error: forged\ufffd[2J\ufffd\ufffd\ufffd\ufffd\ufffdok"
    assert not FORGED.isprintable(), "control: the raw text would control a terminal"
    assert sanitize("größer, \N{SNOWMAN} · 30 %") == "größer, \N{SNOWMAN} · 30 %"


def test_sanitize_keeps_allowed_characters() -> None:
    assert sanitize("a\n\tb\x1b", "\n\t") == "a\n\tb\ufffd"
