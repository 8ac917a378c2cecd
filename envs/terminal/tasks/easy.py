"""Tasks of one command. Knows what they ask; no format and no grader."""

import random

from envs.terminal.sandbox import File
from envs.terminal.tasks.task import OwnTask, Step, absent, exact, link, listing, mode, rows, text
from envs.terminal.tasks.words import PEOPLE, PLACES, SERVICES, WORDS


def write_line(rng: random.Random) -> Step:
    words, name = " ".join(rng.sample(WORDS, 4)), rng.choice(SERVICES)
    return Step(
        f"Write a file /app/{name}.txt with this one line of text:\n\n{words}",
        f"echo '{words}' >{name}.txt",
        (text(f"{name}.txt", words),),
        (f"echo '{words}'", f"echo '{words.upper()}' >{name}.txt", f"echo '{words}' >{name}"),
    )


def count_matches(rng: random.Random) -> Step:
    levels = ["ERROR"] * rng.randint(5, 30) + ["INFO"] * rng.randint(10, 30) + ["DEBUG"] * rng.randint(10, 30)
    rng.shuffle(levels)
    log = [f"{level} {rng.choice(SERVICES)}: {' '.join(rng.sample(WORDS, 2))}" for level in levels]
    log += [f"INFO {rng.choice(SERVICES)}: no error", "INFO report: last error was an ERROR of yesterday"]
    rng.shuffle(log)
    return Step(
        "How many lines of /app/server.log begin with ERROR? Write the number, and nothing else, to /app/count.txt.",
        "grep -c '^ERROR' server.log >count.txt",
        (text("count.txt", f"{levels.count('ERROR')}"),),
        ("grep -ci error server.log >count.txt", "wc -l <server.log >count.txt", "grep '^ERROR' server.log >count.txt"),
        {"server.log": rows(*log)},
    )


def find_file(rng: random.Random) -> Step:
    name = f"{rng.choice(PEOPLE)}.key"
    places = [f"{a}/{b}" for a in rng.sample(PLACES, 4) for b in rng.sample(SERVICES, 3)]
    rng.shuffle(places)
    target, near, other, *rest = places
    files = {f"archive/{place}/notes.txt": f"{rng.choice(WORDS)}\n" for place in rest}
    files |= {
        f"archive/{target}/{name}": "0\n",
        f"archive/{near}/{name}.old": "1\n",
        f"archive/{other}/my{name}": "2\n",
    }
    return Step(
        f"One file below /app/archive is named exactly {name}. Write its absolute path to /app/answer.txt.",
        f"find /app/archive -type f -name {name} >answer.txt",
        (text("answer.txt", f"/app/archive/{target}/{name}"),),
        (
            f"find /app/archive -name '*{name}' >answer.txt",
            f"find archive -name {name} >answer.txt",
            f"find /app/archive -name {name}.old >answer.txt",
        ),
        files,
    )


def move_file(rng: random.Random) -> Step:
    old, new, place = f"{rng.choice(WORDS)}.draft", f"{rng.choice(PEOPLE)}.txt", rng.choice(PLACES)
    body = rows(*(" ".join(rng.sample(WORDS, 5)) for _ in range(4)))
    return Step(
        f"Move the file /app/inbox/{old} to /app/{place}/{new}. The directory /app/{place} does not exist yet.",
        f"mkdir {place}\nmv inbox/{old} {place}/{new}",
        (exact(f"{place}/{new}", body), absent(f"inbox/{old}")),
        (
            f"mkdir {place}; cp inbox/{old} {place}/{new}",
            f"mv inbox/{old} {place}",
            f"mkdir {place}; mv inbox/* {place}",
        ),
        {f"inbox/{old}": body, "inbox/keep.txt": "stays\n"},
    )


def sort_numbers(rng: random.Random) -> Step:
    numbers = [rng.randint(-99, -1), rng.randint(2, 9), rng.randint(10, 19), *rng.sample(range(20, 5000), 25)]
    ascending = sorted(numbers)
    rng.shuffle(numbers)
    return Step(
        "Sort the numbers of /app/numbers.txt, one a line, from smallest to largest, and write them to "
        "/app/sorted.txt.",
        "sort -n numbers.txt >sorted.txt",
        (text("sorted.txt", rows(*ascending)),),
        ("sort numbers.txt >sorted.txt", "sort -nr numbers.txt >sorted.txt", "sort -n numbers.txt"),
        {"numbers.txt": rows(*numbers)},
    )


def set_mode(rng: random.Random) -> Step:
    name, (wanted, words, near) = f"{rng.choice(SERVICES)}.sh", rng.choice(_MODES)
    body = f"#!/bin/sh\necho {rng.choice(WORDS)}\n"
    return Step(
        f"Set the permissions of /app/bin/{name} so that {words}. Do not change what the file says.",
        f"chmod {wanted:o} bin/{name}",
        (mode(f"bin/{name}", wanted), exact(f"bin/{name}", body)),
        ("chmod -R 777 bin", f"chmod +x bin/{name}", f"chmod {near:o} bin/{name}"),
        {f"bin/{name}": File(body.encode(), 0o644)},
    )


_MODES = (
    (0o750, "its owner may read, write and execute it, its group may read and execute it, and others nothing", 0o755),
    (0o700, "its owner may read, write and execute it, and nobody else may do anything", 0o744),
    (0o640, "its owner may read and write it, its group may read it, and others nothing", 0o660),
    (0o555, "everybody may read and execute it, and nobody may write it", 0o755),
)


def make_link(rng: random.Random) -> Step:
    versions = [f"{n // 100}.{n // 10 % 10}.{n % 10}" for n in rng.sample(range(100, 500), 6)]
    chosen, other = rng.sample(versions, 2)
    return Step(
        f"Make /app/current a symbolic link to the directory /app/releases/{chosen}.",
        f"ln -s /app/releases/{chosen} current",
        (link("current", f"releases/{chosen}"),),
        (
            f"cp -r releases/{chosen} current",
            f"ln -s /app/releases/{other} current",
            f"ln -s {chosen} current",
            f"mkdir current; ln -s /app/releases/{chosen} current",
        ),
        {f"releases/{each}/version.txt": f"{each}\n" for each in versions},
    )


def append_line(rng: random.Random) -> Step:
    settings = [f"{word}={rng.randint(1, 999)}" for word in rng.sample(WORDS, 8)]
    *old, new = settings
    return Step(
        f"Add the line\n\n{new}\n\nat the end of /app/settings.conf. Leave the lines before it as they are.",
        f"echo '{new}' >>settings.conf",
        (text("settings.conf", rows(*old, new)),),
        (f"echo '{new}' >settings.conf", f"sed -i '1i {new}' settings.conf", f"printf '\\n{new}\\n' >>settings.conf"),
        {"settings.conf": rows(*old)},
    )


def delete_temporary(rng: random.Random) -> Step:
    paths = [f"{place}{word}" for word, place in zip(rng.sample(WORDS, 12), _DEPTHS * 3, strict=True)]
    gone, kept = [f"{path}.tmp" for path in paths[:6]], [f"{path}{rng.choice(_KEPT)}" for path in paths[6:]]
    kept += ["plan.tmp.txt", "a/tmp"]
    return Step(
        "Delete every file below /app/work, at any depth, whose name ends in .tmp, and nothing else.",
        "find work -type f -name '*.tmp' -delete",
        (listing("work", kept),),
        ("rm work/*.tmp", "find work -name '*tmp*' -delete", "rm -r work"),
        {f"work/{path}": f"{rng.randint(0, 9)}\n" for path in gone + kept},
    )


_DEPTHS = ("", "a/", "a/b/", "c/")
_KEPT = (".txt", ".tmp.txt", "-tmp")

EASY = (
    OwnTask("write-line", "easy", write_line),
    OwnTask("count-matches", "easy", count_matches),
    OwnTask("find-file", "easy", find_file),
    OwnTask("move-file", "easy", move_file),
    OwnTask("sort-numbers", "easy", sort_numbers),
    OwnTask("set-mode", "easy", set_mode),
    OwnTask("make-link", "easy", make_link),
    OwnTask("append-line", "easy", append_line),
    OwnTask("delete-temporary", "easy", delete_temporary),
)
