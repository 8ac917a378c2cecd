"""The Dockerfile subset: what each instruction means, what is refused by name, and what stands for an image."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.terminal import File, parse_images
from envs.terminal.dockerfile import Build, Copy, MakeDirectory, Run, UnsupportedDockerfile, parse_dockerfile
from envs.terminal.rootfs import BuildFailed, _archive_option, _select

SHELL = ("/bin/sh", "-c")


def parse(*lines: str) -> Build:
    return parse_dockerfile("\n".join(("FROM ubuntu:24.04", *lines)))


def run(text: str) -> Run:
    """The only step of a RUN."""
    (step,) = parse(text).steps
    assert isinstance(step, Run)
    return step


def copy(text: str) -> Copy:
    """The last step, a COPY or ADD in /app."""
    step = parse("WORKDIR /app", text).steps[-1]
    assert isinstance(step, Copy)
    return step


def test_steps_come_in_order_and_see_what_was_set_before_them():
    build = parse("ENV A=1", "RUN one", "ENV A=2 B=$A", "WORKDIR /app", "WORKDIR sub", "RUN two")
    assert build == Build(
        "ubuntu:24.04",
        (
            Run((*SHELL, "one"), "/", {"A": "1"}, 3, "RUN one"),
            MakeDirectory("/app"),
            MakeDirectory("/app/sub"),
            Run((*SHELL, "two"), "/app/sub", {"A": "2", "B": "1"}, 7, "RUN two"),
        ),
        {"A": "2", "B": "1"},
        "/app/sub",
    )


@pytest.mark.parametrize(
    ("line", "env"),
    [
        ("ENV A=1 B='two words' C=\"a b\" D=a\\ b", {"A": "1", "B": "two words", "C": "a b", "D": "a b"}),
        ("ENV A the  rest", {"A": "the rest"}),
        ("ENV A='$X' B=\\$X C=\"x$X\"", {"A": "$X", "B": "$X", "C": "x"}),
        ("ENV A=${X:-d} B=${X:+d} C=${X-e} D=${X:-${Y:-z}}", {"A": "d", "B": "", "C": "e", "D": "z"}),
        ("ENV A=", {"A": ""}),
        ("ENV A=b=c", {"A": "b=c"}),
        ("env \\\n# a comment\n  a=1", {"a": "1"}),
    ],
)
def test_variables_are_read_as_a_shell_would(line, env):
    assert parse(line).env == env


def test_arguments_are_seen_while_building_only_and_those_before_from_must_be_asked_for():
    build = parse_dockerfile("ARG TAG=24.04\nARG V=1\nFROM ubuntu:$TAG AS main\nARG V\nARG W=2\nRUN x\nENV E=$V$W$TAG")
    assert build.base == "ubuntu:24.04"
    assert build.env == {"E": "12"}
    assert isinstance(build.steps[0], Run)
    assert build.steps[0].env == {"V": "1", "W": "2"}


def test_variables_of_the_image_are_put_in_and_are_not_the_files_own_until_it_sets_them():
    text = "FROM x\nARG PATH=/arg\nENV A=$PATH\nRUN one\nENV PATH=/b:${PATH}\nENV PATH=$PATH:/c"
    build = parse_dockerfile(text, {"PATH": "/bin"})
    assert build.env == {"A": "/bin", "PATH": "/b:/bin:/c"}
    assert isinstance(build.steps[0], Run)
    assert build.steps[0].env == {"PATH": "/arg", "A": "/bin"}


def test_lines_go_on_behind_a_backslash_and_comments_in_between_vanish():
    assert run("RUN a && \\\n  # no\n\n  b \\\n && c").argv == (*SHELL, "a &&   b  && c")
    build = parse_dockerfile("# escape=`\nFROM x\nRUN a `\n  b \\")
    assert [step.argv for step in build.steps if isinstance(step, Run)] == [(*SHELL, "a   b \\")]


def test_a_run_has_two_forms_and_a_shell_that_can_be_chosen():
    assert run('RUN ["a b", "c"]').argv == ("a b", "c")
    assert run("RUN [ -d /x ]").argv == (*SHELL, "[ -d /x ]")
    step = parse('SHELL ["/bin/bash", "-o", "pipefail", "-c"]', "RUN x").steps[0]
    assert isinstance(step, Run)
    assert step.argv == ("/bin/bash", "-o", "pipefail", "-c", "x")
    assert run("RUN --mount=type=cache,target=/x true").argv == (*SHELL, "true")


def test_here_documents_are_scripts_or_the_shells_or_files():
    assert run("RUN <<EOF\n# kept\necho $A\nEOF").argv == (*SHELL, "# kept\necho $A\n")
    assert run("RUN python3 - <<'EOF'\nprint(1)\nEOF").argv == (*SHELL, "python3 - <<'EOF'\nprint(1)\nEOF\n")
    build = parse("ENV A=1", "COPY <<a.txt <<'b.txt' /app/", "x $A", "a.txt", "y $A", "b.txt", "WORKDIR /w")
    assert build.steps[0] == Copy((), "/app", True, 3, {"a.txt": "x 1\n", "b.txt": "y $A\n"})
    assert build.workdir == "/w"
    assert run("RUN <<-EOF\n\tindented\n\tEOF").argv == (*SHELL, "indented\n")
    assert run("RUN cat <<<word").argv == (*SHELL, "cat <<<word")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("COPY a b /x/", Copy(("a", "b"), "/x", True, 3)),
        ("COPY a b", Copy(("a",), "/app/b", False, 3)),
        ("COPY a .", Copy(("a",), "/app", True, 3)),
        ("COPY . ./sub/", Copy((".",), "/app/sub", True, 3)),
        ('COPY ["a b", "c d"]', Copy(("a b",), "/app/c d", False, 3)),
        ("COPY --chmod=755 --chown=root:root a /a", Copy(("a",), "/a", False, 3, mode=0o755)),
        ("ADD a.tar /", Copy(("a.tar",), "/", True, 3, unpack=True)),
        ("COPY a ../../up", Copy(("a",), "/up", False, 3)),
    ],
)
def test_files_go_where_docker_puts_them(line, expected):
    assert copy(line) == expected


def test_X13_what_an_image_would_start_is_left_out():
    build = parse('ENTRYPOINT ["false"]', "CMD sleep 1", "EXPOSE 80", "LABEL a=b", "STOPSIGNAL 9", "RUN x")
    assert len(build.steps) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("VOLUME /data", "line 2: VOLUME is not supported; understood are FROM, ENV"),
        ("HEALTHCHECK CMD true", "line 2: HEALTHCHECK is not supported"),
        ("ONBUILD RUN x", "ONBUILD is not supported"),
        ("CROSS_BUILD x", "CROSS_BUILD is no known instruction"),
        ("FROM debian", "a build of several stages is not supported"),
        ("COPY --from=builder /a /b", "COPY --from is not supported"),
        ("COPY --chown=app a /b", "COPY --chown is not supported"),
        ("COPY --chmod=u+x a /b", "expected three octal digits"),
        ("ADD https://example.com/x /x", "ADD of an address is not supported; put the file into environment/"),
        ("USER app", "USER 'app' is not supported: a sandbox has one user"),
        ("RUN --mount=type=secret,id=x true", "RUN --mount is not supported"),
        ("RUN --network=host true", "RUN --network is not supported"),
        ("RUN <<EOF\n#!/usr/bin/env python3\nEOF", "names its own interpreter"),
        ("RUN <<EOF\nx", "the here-document EOF has no end"),
        ("ENV A", "expected NAME=value"),
        ('ENV A="b', 'has a " without its other half'),
        ("ENV A=${B#c}", "in a form that is not understood"),
        ("COPY a", "expected at least one source and a target"),
        ("WORKDIR", "expected one path"),
        ("ENV A=\0", "line 2: has a NUL"),
    ],
)
def test_what_is_not_understood_is_refused_by_name_and_line(line, says):
    with pytest.raises(UnsupportedDockerfile, match=says):
        parse(line)


def test_a_dockerfile_begins_with_from():
    with pytest.raises(UnsupportedDockerfile, match="RUN comes before FROM"):
        parse_dockerfile("RUN x\nFROM y")
    with pytest.raises(UnsupportedDockerfile, match="without FROM"):
        parse_dockerfile("# nothing")


def test_root_is_the_user_already():
    assert parse("USER root", "USER 0:0").steps == ()


@given(st.text(alphabet="FROMUNCPY $\\\"'{}<>=#\n\tax/.[],:-", max_size=120))
def test_any_text_is_read_or_refused(text):
    try:
        parse_dockerfile(f"FROM x\n{text}")
    except UnsupportedDockerfile as error:
        refused = str(error)
    else:
        refused = "line"
    assert "line" in refused


# --- files of the context ---------------------------------------------------------------------------------

CONTEXT = {name: File(name.encode()) for name in ("a.txt", "b.txt", "d/.hidden", "d/e/c.txt")}


@pytest.mark.parametrize(
    ("source", "names", "whole"),
    [
        ("a.txt", {"a.txt"}, False),
        ("./a.txt", {"a.txt"}, False),
        ("*.txt", {"a.txt", "b.txt"}, False),
        ("d", {".hidden", "e/c.txt"}, True),
        ("d/e/", {"c.txt"}, True),
        (".", {"a.txt", "b.txt", "d/.hidden", "d/e/c.txt"}, True),
        ("d/*/c.txt", {"c.txt"}, False),
    ],
)
def test_X07_a_source_is_a_file_or_all_of_a_directory(source, names, whole):
    found, is_directory = _select(CONTEXT, source, 1)
    assert (set(found), is_directory) == (names, whole)


@pytest.mark.parametrize(("source", "says"), [("none", "line 4: COPY none: no such file"), ("../x", "leaves the")])
def test_a_source_that_is_not_there_is_named(source, says):
    with pytest.raises(BuildFailed, match=says):
        _select(CONTEXT, source, 4)


def test_archives_are_told_by_what_they_hold():
    assert [_archive_option(data) for data in (b"\x1f\x8b..", b"BZh9", b"\xfd7zXZ\0", b"text")] == [
        "-z",
        "-j",
        "-J",
        None,
    ]


# --- what stands for an image ------------------------------------------------------------------------------


def test_an_image_is_a_row_or_a_stand_in_or_is_refused():
    images = parse_images(["node:*=/roots/node", "org/tool=/roots/tool", "fedora=host", "ubuntu:22.04=/roots/jammy"])
    found = {name: images.find(name) for name in ("node:20", "org/tool:1.2", "fedora:40", "ubuntu:22.04")}
    assert found == {
        "node:20": "/roots/node",
        "org/tool:1.2": "/roots/tool",
        "fedora:40": None,
        "ubuntu:22.04": "/roots/jammy",
    }
    assert images.find("docker.io/library/ubuntu:24.04") is None
    assert images.find("python:3.13-slim@sha256:00") is None
    with pytest.raises(ValueError, match=r"no root file system stands for the image 'rust:1': give rootfs=rust:1="):
        images.find("rust:1")


def test_a_back_end_with_images_of_its_own_is_given_the_name():
    images = parse_images(["ubuntu=org/mine:1"], by_name=True)
    assert [images.find(name) for name in ("ubuntu:24.04", "rust:1")] == ["org/mine:1", "rust:1"]


def test_a_row_that_is_none_says_its_form():
    with pytest.raises(ValueError, match="rootfs has 'ubuntu': expected IMAGE=DIRECTORY, or IMAGE=host"):
        parse_images(["ubuntu"])
