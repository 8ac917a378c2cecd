"""The part of a Dockerfile's language that plain tasks use, read into steps that a sandbox can carry out.

Pure: knows the language, and neither files nor sandboxes. FROM, ENV, ARG, WORKDIR, COPY, ADD of local files, RUN,
SHELL and USER root are understood; what only describes an image or starts its services (`IGNORED`) is left out; any
other instruction, and any option that would change the result, is refused by name and line (`UnsupportedDockerfile`).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from posixpath import join, normpath

IGNORED = ("ENTRYPOINT", "CMD", "LABEL", "MAINTAINER", "EXPOSE", "STOPSIGNAL")
_NOT_UNDERSTOOD = ("VOLUME", "HEALTHCHECK", "ONBUILD")
_SHELL = ("/bin/sh", "-c")


class UnsupportedDockerfile(ValueError):
    """An instruction that is not understood. The message names it, and its line."""


@dataclass(frozen=True)
class Run:
    """Run `argv` in `workdir` with `env`. text: what the file says."""

    argv: tuple[str, ...]
    workdir: str
    env: Mapping[str, str]
    line: int
    text: str


@dataclass(frozen=True)
class Copy:
    """Put files into `target`, an absolute path.

    sources: patterns of paths in the context. written: files whose text is in the Dockerfile. folder: `target` is a
    directory whatever it looks like. mode: permission bits that replace the files' own. unpack: archives are unpacked.
    """

    sources: tuple[str, ...]
    target: str
    folder: bool
    line: int
    written: Mapping[str, str] = field(default_factory=dict)
    mode: int | None = None
    unpack: bool = False


@dataclass(frozen=True)
class MakeDirectory:
    """A working directory that may have to be made."""

    path: str


BuildStep = Run | Copy | MakeDirectory


@dataclass(frozen=True)
class Build:
    """What a Dockerfile says: an image to start from, steps, and what every later command finds."""

    base: str
    steps: tuple[BuildStep, ...]
    env: Mapping[str, str]
    workdir: str = "/"


def parse_dockerfile(text: str, inherited: Mapping[str, str] | None = None) -> Build:
    """The build that `text` describes. inherited: variables of its image, put in where the text names them."""
    if "\0" in text:
        raise UnsupportedDockerfile(f"line {text[: text.index(chr(0))].count(chr(10)) + 1}: has a NUL; remove it")
    state = _State(inherited=inherited or {})
    for instruction in _instructions(text):
        word = instruction.word
        if word in IGNORED:
            continue
        if word not in _READERS:
            known = ", ".join([*_READERS, *IGNORED])
            what = "is not supported" if word in _NOT_UNDERSTOOD else "is no known instruction"
            raise instruction.refused(f"{what}; understood are {known}")
        if word not in ("FROM", "ARG") and state.base is None:
            raise instruction.refused("comes before FROM")
        _READERS[word](state, instruction)
    if state.base is None:
        raise UnsupportedDockerfile("a Dockerfile without FROM says no image to start from")
    return Build(state.base, tuple(state.steps), state.env, state.workdir)


# --- lines -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Instruction:
    word: str
    rest: str
    documents: tuple[tuple[str, bool, str], ...]  # of here-documents: name, whether variables are put in, text
    line: int

    def refused(self, why: str) -> UnsupportedDockerfile:
        return UnsupportedDockerfile(f"line {self.line}: {self.word} {why}")

    def options(self) -> tuple[dict[str, str], str]:
        """The --name=value options in front, and the rest."""
        found, rest = {}, self.rest
        while option := re.match(r"--([a-z-]+)(?:=(\S*))?(?:\s+|$)", rest):
            found[option[1]] = option[2] if option[2] is not None else "true"
            rest = rest[option.end() :]
        return found, rest

    def array(self, text: str) -> list[str] | None:
        """The strings of the JSON form; None for the other one."""
        try:
            value = json.loads(text) if text.startswith("[") else None
        except ValueError:
            return None
        return value if isinstance(value, list) and value and all(isinstance(each, str) for each in value) else None


_DOCUMENT = re.compile(r"(?<!\S)\d*<<(-?)(['\"]?)([A-Za-z_][\w.]*)\2(?=\s|$)")


def _instructions(text: str) -> Iterator[_Instruction]:
    lines = text.splitlines()
    escape = "\\"
    for line in lines:  # directives stand above everything else
        directive = re.fullmatch(r"\s*#\s*(\w+)\s*=\s*(\S+)\s*", line)
        if not directive:
            break
        escape = directive[2] if directive[1].lower() == "escape" else escape
    place = 0
    while place < len(lines):
        start = place
        place, whole = _logical(lines, place, escape)
        if not whole:
            continue
        word, rest = (*whole.split(None, 1), "")[:2]
        documents = []
        for tabs, quote, name in _DOCUMENT.findall(rest) if word.upper() in ("RUN", "COPY", "ADD") else ():
            place, body = _document(lines, place, name, tabs=bool(tabs))
            documents.append((name, not quote, body))
        yield _Instruction(word.upper(), rest.strip(), tuple(documents), start + 1)


def _logical(lines: list[str], place: int, escape: str) -> tuple[int, str]:
    """The next place, and the line that begins here with those that continue it. Comments and empty lines are gone."""
    parts: list[str] = []
    while place < len(lines):
        line = lines[place]
        place += 1
        if not line.strip() or line.lstrip().startswith("#"):
            if not parts:
                return place, ""
            continue
        bare = line.rstrip()
        if not bare.endswith(escape):
            parts.append(line if parts else line.lstrip())
            break
        parts.append(bare[:-1] if parts else bare[:-1].lstrip())
    return place, "".join(parts).strip()


def _document(lines: list[str], place: int, name: str, *, tabs: bool) -> tuple[int, str]:
    body: list[str] = []
    for i, line in enumerate(lines[place:], place + 1):
        text = line.lstrip("\t") if tabs else line
        if text == name:
            return i, "".join(each + "\n" for each in body)
        body.append(text)
    raise UnsupportedDockerfile(f"line {place}: the here-document {name} has no end")


# --- words and variables ---------------------------------------------------------------------------


def _words(text: str, variables: Mapping[str, str], instruction: _Instruction) -> list[str]:
    """The words of `text` as a shell would see them, with variables put in; they are not split again."""
    words: list[str] = []
    current: str | None = None
    quote, i = "", 0
    while i < len(text):
        letter = text[i]
        if letter == "\\" and quote != "'" and i + 1 < len(text):
            keep = quote == '"' and text[i + 1] not in '"$\\'
            current = (current or "") + letter * keep + text[i + 1]
            i += 2
        elif letter == quote:
            quote, i = "", i + 1
        elif letter in "\"'" and not quote:
            quote, current, i = letter, current or "", i + 1
        elif letter == "$" and quote != "'":
            value, i = _variable(text, i, variables, instruction)
            current = (current or "") + value
        elif letter.isspace() and not quote:
            words += [] if current is None else [current]
            current, i = None, i + 1
        else:
            current, i = (current or "") + letter, i + 1
    if quote:
        raise instruction.refused(f"has a {quote} without its other half")
    return words + ([] if current is None else [current])


_NAME = re.compile(r"\$(\w+)")
_BRACED = re.compile(r"\$\{(\w+)(?:(:?[-+])((?:[^{}$]|\$\{[^{}]*\}|\$)*))?\}")


def _variable(text: str, i: int, variables: Mapping[str, str], instruction: _Instruction) -> tuple[str, int]:
    """The value of the variable that begins at `i`, and where it ends."""
    if plain := _NAME.match(text, i):
        return variables.get(plain[1], ""), plain.end()
    braced = _BRACED.match(text, i)
    if braced is None:
        if text.startswith("${", i):
            raise instruction.refused(f"has a variable in a form that is not understood: {text[i : i + 40]}")
        return "$", i + 1
    name, operator, word = braced.groups()
    value = variables.get(name)
    given = bool(value) if operator and operator.startswith(":") else value is not None
    if operator is None or (given and operator.endswith("-")):
        return value or "", braced.end()
    if given or operator.endswith("-"):
        return "".join(_words(f'"{word}"', variables, instruction)), braced.end()
    return "", braced.end()


# --- instructions ----------------------------------------------------------------------------------


@dataclass
class _State:
    inherited: Mapping[str, str]
    base: str | None = None
    steps: list[BuildStep] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    before_from: dict[str, str] = field(default_factory=dict)  # arguments that only a bare ARG brings in
    workdir: str = "/"
    shell: tuple[str, ...] = _SHELL

    @property
    def own(self) -> dict[str, str]:
        return {**self.args, **self.env}

    @property
    def variables(self) -> dict[str, str]:
        return {**self.args, **self.inherited, **self.env}


def _from(state: _State, instruction: _Instruction) -> None:
    if state.base is not None:
        raise instruction.refused("is given twice; a build of several stages is not supported")
    options, rest = instruction.options()
    words = _words(rest, state.variables, instruction)
    if not words or (len(words) != 1 and not (len(words) == 3 and words[1].upper() == "AS")):
        raise instruction.refused(f"{rest!r}: expected FROM <image>")
    if set(options) - {"platform"}:
        raise instruction.refused(f"--{min(options)} is not supported")
    state.base, state.before_from, state.args = words[0], state.args, {}


def _env(state: _State, instruction: _Instruction) -> None:
    first = instruction.rest.split(None, 1)
    if first and "=" not in first[0]:
        if len(first) < 2:
            raise instruction.refused(f"{instruction.rest!r}: expected NAME=value")
        state.env[first[0]] = " ".join(_words(first[1], state.variables, instruction))
        return
    state.env |= dict(_assignments(state, instruction))


def _arg(state: _State, instruction: _Instruction) -> None:
    for word in _words(instruction.rest, state.variables, instruction):
        name, equals, value = word.partition("=")
        state.args[name] = value if equals else state.before_from.get(name, "")


def _assignments(state: _State, instruction: _Instruction) -> Iterator[tuple[str, str]]:
    for word in _words(instruction.rest, state.variables, instruction):
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise instruction.refused(f"{word!r}: expected NAME=value")
        yield name, value


def _workdir(state: _State, instruction: _Instruction) -> None:
    words = _words(instruction.rest, state.variables, instruction)
    if len(words) != 1:
        raise instruction.refused(f"{instruction.rest!r}: expected one path")
    state.workdir = _absolute(state.workdir, words[0])
    state.steps.append(MakeDirectory(state.workdir))


def _absolute(workdir: str, path: str) -> str:
    """A path without . and .., with one slash in front."""
    return "/" + normpath(join(workdir, path)).lstrip("/")


def _user(state: _State, instruction: _Instruction) -> None:
    words = _words(instruction.rest, state.variables, instruction)
    if words not in (["root"], ["0"], ["root:root"], ["0:0"]):
        raise instruction.refused(
            f"{instruction.rest!r} is not supported: a sandbox has one user, who is root inside it"
        )


def _shell(state: _State, instruction: _Instruction) -> None:
    words = instruction.array(instruction.rest)
    if words is None:
        raise instruction.refused(f'{instruction.rest!r}: expected the form ["program", "option"]')
    state.shell = tuple(words)


def _run(state: _State, instruction: _Instruction) -> None:
    options, rest = instruction.options()
    if any(name != "mount" or not value.startswith("type=cache") for name, value in options.items()):
        raise instruction.refused(f"--{min(options)} is not supported")
    argv = instruction.array(rest)
    if argv is None:
        argv = [*state.shell, _script(instruction, rest)]
    state.steps.append(Run(tuple(argv), state.workdir, state.own, instruction.line, f"RUN {instruction.rest}"))


def _script(instruction: _Instruction, rest: str) -> str:
    """The text for the shell. A here-document alone is the script; behind a command it is the shell's to read."""
    if not instruction.documents:
        return rest
    if not _DOCUMENT.fullmatch(rest):
        return rest + "\n" + "".join(f"{body}{name}\n" for name, _, body in instruction.documents)
    ((_, _, body),) = instruction.documents
    if body.startswith("#!"):
        raise instruction.refused("with a script that names its own interpreter is not supported; write bash <<EOF")
    return body


def _copy(state: _State, instruction: _Instruction) -> None:
    options, rest = instruction.options()
    mode = _mode(options, instruction)
    words = instruction.array(rest) or _words(_DOCUMENT.sub("<<", rest), state.variables, instruction)
    if len(words) < 2:
        raise instruction.refused(f"{rest!r}: expected at least one source and a target")
    *given, target = words
    sources = tuple(source for source in given if source != "<<")
    if any(re.match(r"[a-z+]+://|git@", source) for source in sources):
        raise instruction.refused("of an address is not supported; put the file into environment/")
    written = {
        name: "".join(_words(_quoted(body), state.variables, instruction)) if put_in else body
        for name, put_in, body in instruction.documents
    }
    folder = len(given) > 1 or target.endswith(("/", "/.")) or target == "."
    unpack = instruction.word == "ADD"
    place = _absolute(state.workdir, target)
    state.steps.append(Copy(sources, place, folder or place == "/", instruction.line, written, mode, unpack))


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'


def _mode(options: Mapping[str, str], instruction: _Instruction) -> int | None:
    for name, value in options.items():
        if name == "chown" and value.replace("root", "0") in ("0", "0:0"):
            continue
        if name not in ("chmod", "link"):
            raise instruction.refused(f"--{name} is not supported")
    text = options.get("chmod")
    if text is not None and not re.fullmatch(r"0?[0-7]{3}", text):
        raise instruction.refused(f"--chmod={text}: expected three octal digits")
    return None if text is None else int(text, 8)


_READERS: Mapping[str, Callable[[_State, _Instruction], None]] = {
    "FROM": _from,
    "ENV": _env,
    "ARG": _arg,
    "WORKDIR": _workdir,
    "COPY": _copy,
    "ADD": _copy,
    "RUN": _run,
    "USER": _user,
    "SHELL": _shell,
}
