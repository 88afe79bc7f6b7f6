"""Options and limits that several commands share."""

from typing import Annotated

import typer

MAX_SEED = 2**63 - 1  # torch takes no larger one
MAX_COUNT = 2**24
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON on standard output")]
