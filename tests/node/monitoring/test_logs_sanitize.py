from node.monitoring.logs import sanitize

FORGED = "x\n12:00:00 error: forged\x1b[2J\r\x00\u202e\x9b\u2028ok"


def test_one_line_that_can_only_be_read() -> None:
    assert sanitize(FORGED) == "x\ufffd12:00:00 error: forged\ufffd[2J\ufffd\ufffd\ufffd\ufffd\ufffdok"
    assert not FORGED.isprintable(), "the control: it would steer a terminal"
    assert sanitize("größer, \N{SNOWMAN} · 30 %") == "größer, \N{SNOWMAN} · 30 %"


def test_what_is_kept() -> None:
    assert sanitize("a\n\tb\x1b", "\n\t") == "a\n\tb\ufffd"
