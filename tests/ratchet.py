"""Count what makes the product hard to hold in the head, and keep the counts from growing.

`tests/ratchet.toml` has a ceiling for each figure. `python -m tests.ratchet` shows figures, ceilings and places;
`--lower` lowers each ceiling to its figure.
"""

import argparse
import ast
import dataclasses
import functools
import gc
import io
import re
import tokenize
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CEILINGS = Path(__file__).with_name("ratchet.toml")
PRODUCT = ("murmuration", "node", "optim", "protocol")
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")
SHOWN_PLACES = 12
# The first word of a docstring is one of these; add a verb that is missing.
VERBS = """
abandon abort accept accumulate acknowledge add adjust admit adopt advance aggregate align allocate allow announce
answer append apply arrange ask assert assign attach average await back ban begin bind block bound bring broadcast
build cache calculate call cancel cap carry cast change charge check choose clamp clean clear clip clone close
collect combine commit compare compile complete compose compress compute configure confirm connect construct consume
contain continue convert copy correct count cover create cut date deal decide declare decode decompress decrease
decrypt defer define delay delete deliver derive describe detach detect determine dial discard disconnect dispatch
display distribute divide do download drain draw drive drop dump emit enable encode encrypt end enforce enter
enumerate erase estimate evaluate evict examine exchange exclude execute exit expand expect expire explain export
extend extract fail feed fetch fill filter find finish fit flag flatten flush follow forbid force forget fork format
forward free freeze gather generate get give gossip grant group grow guard guess hand handle hash hide hold host
identify ignore import include increase increment index infer inform initialize insert inspect install interpolate
interpret interrupt invalidate invite issue iterate join judge keep kill label launch learn leave lend let limit
link list listen load lock log look lower make map mark match measure merge migrate mix modify move multiply name
narrow negotiate normalize note notice notify observe obtain offer open order overwrite pack pad page parse pass
pause perform persist pick pin place plan poll post predict prefer prepare preserve prevent print probe process
produce project propose protect prove prune publish pull push put quantize query queue raise rank rate reach react
read rebuild recalculate receive recompute reconnect record recover redraw reduce refill refresh refuse register
reject release reload remember remove rename render renew reorder repeat replace replay replicate reply report
request require rescale resend reserve reset resize resolve respond restart restore restrict resubmit resume retain
retire retrieve retry return reuse reveal revert review revise revoke rewrite rotate round route run sample save
scale scan schedule score search seed select send separate serialize serve set settle shorten show shrink shuffle
shut sign simulate skip sleep slice smooth solve sort spawn split spread stack start step stop store stream strip
subscribe submit subtract sum summarize supply suspend swap switch sync synchronize take tally terminate test
throttle tie time toggle track train transfer transform translate transmit treat trim truncate try tune turn undo
unlink unlock unpack unpin unregister update upload use validate vary verify view visit void vote wait wake walk
warn watch weigh withdraw wrap write yield
"""
FREE_RELATIVE = re.compile(
    r"(?:^|[.;:,(]\s+|\b(?:and|or|but|of|than|by|with|for|to|in|on|from)\s+)(?:what|who|whoever|whom)\s+(?!is\s+this)",
    re.IGNORECASE,
)
CALQUE = re.compile(
    r"\b(?:anew|so many|for all that|at hand|beside|mend(?:s|ed)?|who(?:ever|m)|told)\b"
    r"|(?<!there )\bis no (?!longer|more)\w+",
    re.IGNORECASE,
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass
class Source:
    """One hand-written file. `path` is relative to the root."""

    path: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @functools.cached_property
    def prose(self) -> list[tuple[int, str]]:
        return list(prose(self))

    def functions(self) -> Iterator[Function]:
        return (node for node in self.nodes if isinstance(node, Function))

    def place(self, node: ast.AST) -> str:
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


@dataclasses.dataclass
class Finding:
    """A figure, with the places that it counts if they can be named."""

    figure: int
    places: list[str] = dataclasses.field(default_factory=list)


@functools.cache
def read_sources(*folders: str, root: Path = ROOT) -> list[Source]:
    """Return the hand-written files below the folders; files are read and parsed once."""
    paths = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    return [
        Source(path.relative_to(root).as_posix(), path.read_text()) for path in paths if not GENERATED.search(path.name)
    ]


def listed(places: Iterable[str]) -> Finding:
    found = list(places)
    return Finding(len(found), found)


def imported_modules(source: Source, known: set[str]) -> set[str]:
    """Return the modules among `known` that the source imports at any place."""
    found: set[str] = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= modules or {node.module}
    return (found & known) - {source.module}


def find_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module: those that reach each other both ways."""
    order: list[str] = []
    seen: set[str] = set()
    for start in graph:
        _append_after_successors(start, graph, seen, order)
    reverse: dict[str, set[str]] = {name: set() for name in graph}
    for name, others in graph.items():
        for other in others:
            reverse[other].add(name)
    seen.clear()
    circles = []
    for start in reversed(order):
        group: list[str] = []
        _append_after_successors(start, reverse, seen, group)
        if len(group) > 1:
            circles.append(sorted(group))
    return sorted(circles)


def _append_after_successors(start: str, graph: dict[str, set[str]], seen: set[str], order: list[str]) -> None:
    """Append each unseen module that `start` reaches, after the modules that it leads to."""
    if start in seen:
        return
    seen.add(start)
    path = [(start, iter(sorted(graph[start])))]
    while path:
        name, rest = path[-1]
        step = next((other for other in rest if other not in seen), None)
        if step is None:
            order.append(name)
            path.pop()
        else:
            seen.add(step)
            path.append((step, iter(sorted(graph[step]))))


def count_modules(product: list[Source], _: list[Source]) -> Finding:
    return Finding(sum(not source.path.endswith("__init__.py") for source in product))


def find_modules_in_circles(product: list[Source], _: list[Source]) -> Finding:
    known = {source.module for source in product}
    circles = find_circles({source.module: imported_modules(source, known) for source in product})
    return Finding(sum(map(len, circles)), [" <-> ".join(circle) for circle in circles])


def _public_classes(sources: list[Source]) -> Iterator[tuple[ast.ClassDef, Source]]:
    for source in sources:
        yield from (
            (node, source) for node in source.tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_"
        )


def find_double_names(product: list[Source], _: list[Source]) -> Finding:
    places: dict[str, list[str]] = {}
    for node, source in _public_classes(product):
        places.setdefault(node.name, []).append(source.place(node))
    return listed(f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1)


def find_lonely_protocols(product: list[Source], tests: list[Source]) -> Finding:
    """Find Protocols that one file alone names: its concrete type, or a Callable, would say the same."""
    places = {
        node.name: source.place(node)
        for node, source in _public_classes(product)
        if any(re.search(r"\bProtocol\b", ast.unparse(base)) for base in node.bases)
    }
    if not places:
        return Finding(0)
    words = re.compile(rf"\b(?:{'|'.join(places)})\b")
    files = dict.fromkeys(places, 0)
    for source in [*product, *tests]:
        for name in set(words.findall(source.text)):
            files[name] += 1
    return listed(f"{place} {name}" for name, place in places.items() if files[name] == 1)


def find_late_lambdas(product: list[Source], _: list[Source]) -> Finding:
    return listed(
        source.place(node)
        for source in product
        for node in source.nodes
        if isinstance(node, ast.Lambda)
        and any(isinstance(name, ast.Name) and name.id == "self" for name in ast.walk(node))
    )


def _docstrings(product: list[Source]) -> Iterator[tuple[str, str]]:
    for source in product:
        for node in source.functions():
            text = ast.get_docstring(node)
            if text:
                yield source.place(node), text


def count_return_docstrings(product: list[Source], _: list[Source]) -> Finding:
    texts = [text for _, text in _docstrings(product)]
    share = sum(bool(re.match(r"Returns?\b", text)) for text in texts) / max(1, len(texts))
    return Finding(round(100 * share))


def begins_with_a_verb(text: str) -> bool:
    word = re.match(r"[a-z]+", text.strip().lower())
    return word is not None and word[0] in VERBS.split()


def find_docstrings_without_verb(product: list[Source], _: list[Source]) -> Finding:
    return listed(
        f"{place}: {text.splitlines()[0][:60]}" for place, text in _docstrings(product) if not begins_with_a_verb(text)
    )


def prose(source: Source) -> Iterator[tuple[int, str]]:
    """Yield the lines, with their numbers, of comments, of docstrings and of other strings of several words."""
    inside: set[int] = set()
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from ((node.lineno + number, line) for number, line in enumerate(node.value.split("\n")))
            inside |= set(range(node.lineno, node.end_lineno or node.lineno)) - {node.lineno}
    for number, line in enumerate(source.text.split("\n"), 1):
        if "#" in line and number not in inside:
            yield from ((number, comment) for comment in _comments(line.strip()))


def _comments(line: str) -> Iterator[str]:
    try:
        for token in tokenize.generate_tokens(io.StringIO(line).readline):
            if token.type == tokenize.COMMENT:
                yield token.string.lstrip("# ")
    except (tokenize.TokenError, SyntaxError):  # the rest of a bracket is on other lines; its comment came before
        return


def _find_words(pattern: re.Pattern[str], product: list[Source]) -> Finding:
    return listed(
        f"{source.path}:{number} {hit[0].strip(' .;:,(')!r}: {line.strip()[:70]}"
        for source in product
        for number, line in source.prose
        for hit in pattern.finditer(line.strip())
    )


def find_free_relatives(product: list[Source], _: list[Source]) -> Finding:
    return _find_words(FREE_RELATIVE, product)


def find_calques(product: list[Source], _: list[Source]) -> Finding:
    return _find_words(CALQUE, product)


def _own_nodes(loop: ast.AST) -> Iterator[ast.AST]:
    """Yield what a loop runs itself, without the bodies of loops and functions inside it."""
    for child in ast.iter_child_nodes(loop):
        if not isinstance(child, ast.While | ast.For | ast.AsyncFor | Function | ast.Lambda):
            yield child
            yield from _own_nodes(child)


def _is_sleep(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "sleep"
        and ast.unparse(node.func.value) in {"asyncio", "time"}
    )


def find_sleep_loops(product: list[Source], _: list[Source]) -> Finding:
    return listed(
        source.place(loop)
        for source in product
        for loop in source.nodes
        if isinstance(loop, ast.While | ast.For | ast.AsyncFor) and any(_is_sleep(node) for node in _own_nodes(loop))
    )


FIRST_KEY = re.compile(r"^(?P<table>[\w.]+)(?:\[next\(iter\((?P=table)\)\)\]|\.pop\(next\(iter\((?P=table)\)\).*\))$")


def drops_the_oldest(node: ast.AST) -> bool:
    """Return whether the node removes the first entry of a dict by hand."""
    if isinstance(node, ast.Delete):
        return any(FIRST_KEY.match(ast.unparse(target)) for target in node.targets)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"pop", "popitem"}:
        return bool(FIRST_KEY.match(ast.unparse(node)) or any(keyword.arg == "last" for keyword in node.keywords))
    return False


def find_bounded_dicts(product: list[Source], _: list[Source]) -> Finding:
    return listed(source.place(node) for source in product for node in source.nodes if drops_the_oldest(node))


FIGURES: dict[str, tuple[Callable[[list[Source], list[Source]], Finding], str]] = {
    "modules": (count_modules, "merge a module that is not an idea of its own into its importer"),
    "modules_in_circles": (find_modules_in_circles, "pass the object or an event, instead of importing back"),
    "double_class_names": (find_double_names, "give one of the classes another name"),
    "protocols_named_in_one_file": (find_lonely_protocols, "annotate with the concrete type or a Callable"),
    "lambdas_over_self": (find_late_lambdas, "pass a method or functools.partial"),
    "docstrings_with_return_percent": (count_return_docstrings, "drop docstrings that repeat the signature"),
    "docstrings_without_verb": (find_docstrings_without_verb, "begin with an imperative verb, or add it to VERBS"),
    "free_relatives": (
        find_free_relatives,
        "name the thing or the component: 'the fetched blob', not 'what is fetched'",
    ),
    "calques": (find_calques, "use the English idiom (again, next to, fix, is not a ...)"),
    "sleep_loops": (find_sleep_loops, "use the helper for periodic tasks"),
    "bounded_dicts_by_hand": (find_bounded_dicts, "use the bounded table of the package"),
}


def measure(root: Path = ROOT) -> dict[str, Finding]:
    """Return all figures of the product below `root`."""
    gc_was_on = gc.isenabled()
    gc.disable()  # nothing here makes circles, and the trees are large
    try:
        product, tests = read_sources(*PRODUCT, root=root), read_sources("tests", root=root)
        return {name: count(product, tests) for name, (count, _) in FIGURES.items()}
    finally:
        if gc_was_on:
            gc.enable()


def read_ceilings() -> dict[str, int]:
    return dict(tomllib.loads(CEILINGS.read_text()))


def find_risen(found: dict[str, Finding], ceilings: dict[str, int]) -> list[str]:
    """Return a message for each figure above its ceiling."""
    risen = []
    for name, finding in found.items():
        if finding.figure > ceilings[name]:
            places = finding.places[:SHOWN_PLACES] + ["..."] * (len(finding.places) > SHOWN_PLACES)
            risen.append(
                f"{name} is {finding.figure}, its ceiling {ceilings[name]}: {FIGURES[name][1]}. If the addition is "
                f"honest and nothing can go for it, raise the ceiling in tests/{CEILINGS.name} in the same commit and "
                "say why in its body." + "".join(f"\n    {place}" for place in places)
            )
    return risen


def lower(found: dict[str, Finding], text: str) -> str:
    """Return the text of the ceilings, each lowered to its figure; a lower ceiling stays."""

    def lowered(line: re.Match[str]) -> str:
        return f"{line[1]} = {min(int(line[2]), found[line[1]].figure)}"

    return re.sub(r"^(\w+) = (\d+)$", lowered, text, flags=re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lower", action="store_true", help="lower each ceiling to its figure")
    parser.add_argument("figures", nargs="*", help="show all places of these figures")
    arguments = parser.parse_args()
    found = measure()
    if arguments.lower:
        CEILINGS.write_text(lower(found, CEILINGS.read_text()))
    ceilings = read_ceilings()
    for name, finding in found.items():
        print(f"{name:32} {finding.figure:7} ceiling {ceilings[name]}")
        if name in arguments.figures:
            print(*(f"    {place}" for place in finding.places), sep="\n")


if __name__ == "__main__":
    main()
