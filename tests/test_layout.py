"""The rules of the house hold for every file: imports, names, docstrings, the README's tree."""

import ast
import functools
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS = (
    "types",
    "settings",
    "env",
    "http",
    "seats",
    "tools",
    "models",
    "chat",
    "algo",
    "runtime",
    "config",
    "plan",
    "train",
    "cli",
)
PURE = ("models", "chat", "algo")
EFFECTS = frozenset(
    [
        "anyio",
        "asyncio",
        "concurrent",
        "httpx",
        "logging",
        "multiprocessing",
        "os",
        "pathlib",
        "random",
        "requests",
        "rich",
        "sched",
        "shutil",
        "signal",
        "socket",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "trio",
        "urllib",
    ]
)
READS_FILES = frozenset({"models/gguf.py", "models/gguf_file.py", "models/load.py", "models/export.py"})
"""The exception among the pure: what is in a file on disk is their very subject, so they may know paths."""

FORBIDDEN_NAMES = frozenset({"utils", "util", "common", "helpers", "helper", "base", "v2", "legacy", "misc"})
CATCHES_EVERYTHING = frozenset({"jaxrl/runtime/rollout.py"})
"""The one place where any error of an environment becomes the ending of its episode."""


def sources(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def imported(node: ast.AST) -> list[str]:
    """Modules an import statement may load; `from a import b` loads a and perhaps a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def imports(path: Path) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno} is a relative import"
        for module in imported(node):
            yield node, module


def layer(path: Path) -> str:
    return path.relative_to(ROOT / "jaxrl").parts[0].removesuffix(".py")


def test_imports_point_down():
    for path in sources("jaxrl"):
        here = layer(path)
        for node, module in imports(path) if here != "__init__" else ():
            top, *rest = module.split(".")
            where = f"{name(path)}:{node.lineno} imports {module}"
            assert top not in ("envs", "recipes", "tests", "benchmarks"), where
            if top == "jaxrl":
                assert rest, f"{where}, the package as a whole"
                assert LAYERS.index(rest[0]) <= LAYERS.index(here), f"{where}, above it"


def test_the_pure_half_imports_nothing_with_effects():
    for path in sources(*(f"jaxrl/{p}" for p in PURE)):
        allowed = {"pathlib", "os"} if name(path).removeprefix("jaxrl/") in READS_FILES else set()
        for node, module in imports(path):
            assert module.split(".")[0] not in EFFECTS - allowed, f"{name(path)}:{node.lineno} imports {module}"


def test_environments_import_only_the_public_nouns():
    for path in sources("envs"):
        own = name(path).split("/")[1]
        for node, module in imports(path):
            top, *rest = module.split(".")
            where = f"{name(path)}:{node.lineno} imports {module}"
            if top == "jaxrl":
                assert rest[:1] in (["types"], ["env"], ["http"], ["seats"], ["tools"]), where
            if top == "envs":
                assert rest[:1] == [own], f"{where} of another environment"
            assert top not in ("recipes", "tests", "benchmarks"), where


def optional_packages() -> set[str]:
    """Packages of the extras, which may be imported where they are used, so that the core runs without them."""
    text = (ROOT / "pyproject.toml").read_text()
    extras = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    core = text.split("[project.optional-dependencies]")[0]
    named = {n.lower().replace("-", "_") for n in re.findall(r'"([A-Za-z0-9_-]+)[\["<>=~!]', extras)}
    return {n for n in named if f'"{n.replace("_", "-")}' not in core}


def functions(path: Path) -> list[ast.AST]:
    return [n for n in ast.walk(tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]


def test_no_import_hides_in_a_function():
    optional = optional_packages()
    for path in sources("jaxrl", "envs", "recipes"):
        lines = path.read_text().splitlines()
        for node in (node for function in functions(path) for node in ast.walk(function)):
            for module in imported(node):
                where = f"{name(path)}:{node.lineno} imports {module} inside a function"
                assert module.split(".")[0].lower() in optional, f"{where}, and it is no optional extra"
                assert "#" in lines[node.lineno - 1], f"{where} without a comment that says why"


def test_a_file_is_named_after_what_it_is():
    for path in sources("jaxrl", "envs", "recipes", "benchmarks", "tests"):
        words = set(path.relative_to(ROOT).with_suffix("").parts) | set(path.stem.split("_"))
        assert not words & FORBIDDEN_NAMES, name(path)


def test_what_is_public_has_a_docstring():
    for path in (p for p in sources("jaxrl") if p.read_text().strip()):
        module = tree(path)
        nouns = [n for n in module.body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        bare = [n.name for n in nouns if not n.name.startswith("_") and not ast.get_docstring(n)]
        assert (name(path), bare) == (name(path), [])
        assert ast.get_docstring(module), f"{name(path)} has none"


def is_broad(caught: ast.expr | None) -> bool:
    kinds = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(k is None or (isinstance(k, ast.Name) and k.id in ("Exception", "BaseException")) for k in kinds)


def test_only_the_rollout_catches_everything():
    for path in (p for p in sources("jaxrl", "envs", "recipes") if name(p) not in CATCHES_EVERYTHING):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler):
                reraises = isinstance(node.body[-1], ast.Raise)
                assert reraises or not is_broad(node.type), f"{name(path)}:{node.lineno} catches everything"


def tracked() -> list[Path]:
    """Files git knows of; without git (an unpacked archive) the source files."""
    listed = subprocess.run(("git", "ls-files", "-z"), cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        return sources("jaxrl", "envs", "recipes", "benchmarks", "tests")
    return [ROOT / n for n in listed.stdout.split("\0") if n and (ROOT / n).is_file()]


def test_no_file_names_a_place_on_someones_machine():
    places = re.compile(rb"/(?:home|Users|root|work)/[A-Za-z0-9_.-]+|[A-Z]:\\\\Users")
    found = [
        f"{name(path)}: {match.group().decode()}"
        for path in tracked()
        if b"\0" not in (data := path.read_bytes())
        for match in places.finditer(data)
    ]
    assert found == []


# --- the README's tree -------------------------------------------------------------------------------


def test_the_readme_tree_names_every_file_once_with_a_comment():
    listed = readme_tree((ROOT / "README.md").read_text())
    assert [path for path, n in Counter(path for path, _ in listed).items() if n > 1] == [], "listed twice"
    assert [path for path, comment in listed if not comment] == [], "without a comment"
    have = {name(p) for p in tracked() if p.suffix == ".py" and name(p).split("/")[0] != "tests" and p.stat().st_size}
    have |= {f"{name(p.parent)}/" for p in tracked() if p.name.startswith("test_") and p.suffix == ".py"}
    missing, gone = have - {path for path, _ in listed}, {path for path, _ in listed} - have
    assert (sorted(missing), sorted(gone)) == ([], []), "the tree lacks the first and should not have the second"


def readme_tree(readme: str) -> list[tuple[str, str]]:
    """(path, comment) of each line of the fenced block that begins with `jaxrl/`; bare folders are headings.

    A line ending in `/` opens a folder at its indentation; deeper lines lie in it. Files end in .py. A folder counts
    as an entry when it is of tests, which are listed by folder.
    """
    block = re.search(r"^```[a-z]*\n(jaxrl/.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert block, "README.md has no fenced block that begins with a line `jaxrl/`"
    entries: list[tuple[str, str]] = []
    folders: list[tuple[int, str]] = []
    for line in filter(str.strip, block.group(1).splitlines()):
        indent = len(line) - len(line.lstrip())
        path, _, comment = line.strip().partition(" ")
        folders = [f for f in folders if f[0] < indent]
        whole = (folders[-1][1] if folders else "") + path
        if path.endswith("/"):
            folders.append((indent, whole))
        if path.endswith(".py") or (path.endswith("/") and whole.startswith("tests/")):
            entries.append((whole, comment.strip()))
    return entries


def test_the_tree_reader_reads_trees():
    folders = "jaxrl/\n  types.py   nouns\n  models/    PURE\n    lora.py  adapters\ntests/  mirror\n  algo/ losses\n"
    text = f"# x\n```\n{folders}```\n"
    assert readme_tree(text) == [
        ("jaxrl/types.py", "nouns"),
        ("jaxrl/models/lora.py", "adapters"),
        ("tests/", "mirror"),
        ("tests/algo/", "losses"),
    ]
