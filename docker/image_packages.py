"""Print the packages of an image, one a line: those that the project needs, and those of extras such as data,hub."""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
waiting = [*project["dependencies"], f"{project['name']}[{sys.argv[1]}]"]
shown: dict[str, None] = {}
while waiting:
    requirement = waiting.pop(0)
    own = re.fullmatch(rf"{project['name']}\[(.*)\]", requirement)
    if own is None:
        shown[requirement] = None
        continue
    for extra in filter(None, own[1].split(",")):
        waiting += project["optional-dependencies"][extra]
print(*shown, sep="\n")
