"""Tasks of a pipeline or a few commands. Knows what they ask; no format and no grader."""

import random
from collections import Counter

from envs.terminal.tasks.archives import archive
from envs.terminal.tasks.task import OwnTask, Step, exact, listing, rows, text
from envs.terminal.tasks.words import PEOPLE, PLACES, SERVICES, WORDS


def total_by_place(rng: random.Random) -> Step:
    places = rng.sample(PLACES, 5)
    sales = [(rng.choice(places), rng.choice(PEOPLE), rng.randint(10, 900)) for _ in range(50)]
    totals = Counter[str]()
    for place, _, amount in sales:
        totals[place] += amount
    return Step(
        "The columns of /app/sales.csv are place, seller and amount, with a header line. For each place, write a line "
        "place,total to /app/totals.csv, where total is the sum of its amounts. Sort by place; write no header.",
        "awk -F, 'NR > 1 { sum[$1] += $3 } END { for (p in sum) print p \",\" sum[p] }' sales.csv | sort >totals.csv",
        (text("totals.csv", rows(*(f"{place},{totals[place]}" for place in sorted(totals)))),),
        (
            "awk -F, '{ sum[$1] += $3 } END { for (p in sum) print p \",\" sum[p] }' sales.csv | sort >totals.csv",
            "tail -n +2 sales.csv | cut -d, -f1 | sort | uniq -c | awk '{ print $2 \",\" $1 }' >totals.csv",
            "awk -F, 'NR > 1 { s[$1] += $3 } END { for (p in s) print p \",\" s[p] }' sales.csv | sort -r >totals.csv",
        ),
        {"sales.csv": rows("place,seller,amount", *(",".join(map(str, sale)) for sale in sales))},
    )


def fix_script(rng: random.Random) -> Step:
    items = [(" ".join(rng.sample(WORDS, rng.choice((1, 2, 2)))), rng.randint(1, 40)) for _ in range(20)]
    most = rng.randint(5, 15)
    items += [("amber dune", most - 1), ("iris", most)]
    wanted = rows(*(f"{name}: {count}" for name, count in items if count < most))
    loop = "while IFS=';' read -r name count; do"
    return Step(
        "The script /app/low.sh should print `name: count` for every line of /app/stock.txt (name;count) whose count "
        f"is less than {most}, in the order of the file. It is broken: names may have spaces. Fix it, and write what "
        "it prints to /app/low.txt.",
        f"""cat >low.sh <<'END'
#!/bin/bash
{loop}
  if [ "$count" -lt {most} ]; then
    echo "$name: $count"
  fi
done </app/stock.txt
END
bash low.sh >low.txt""",
        (text("low.txt", wanted),),
        (
            "bash low.sh >low.txt || true",
            f"awk -F';' '$2 <= {most} {{ print $1 \": \" $2 }}' stock.txt >low.txt",
            f"awk -F';' '$2 < {most} {{ print $1 \":\" $2 }}' stock.txt >low.txt",
        ),
        {
            "stock.txt": rows(*(f"{name};{count}" for name, count in items)),
            "low.sh": f"""#!/bin/bash
for line in $(cat /app/stock.txt); do
  name=${{line%;*}}
  count=${{line#*;}}
  if [ "$count" -lt {most} ]; then
    echo "$name: $count"
  fi
done
""",
        },
    )


def first_of_each(rng: random.Random) -> Step:
    distinct = [f"{rng.choice(SERVICES)} {' '.join(rng.sample(WORDS, 2))}" for _ in range(15)]
    lines = [*distinct, *rng.choices(distinct, k=30)]
    rng.shuffle(lines)
    lines = [*lines, lines[0], sorted(lines)[0]]
    return Step(
        "Lines of /app/events.log are repeated, not always one after the other. Write its lines to /app/unique.log, "
        "each only once, where it comes first; keep the order of the file.",
        "awk '!seen[$0]++' events.log >unique.log",
        (text("unique.log", rows(*dict.fromkeys(lines))),),
        (
            "uniq events.log >unique.log",
            "sort -u events.log >unique.log",
            "tac events.log | awk '!s[$0]++' >unique.log",
        ),
        {"events.log": rows(*lines)},
    )


def extract_one(rng: random.Random) -> Step:
    name, (place, other), services = f"{rng.choice(WORDS)}.conf", rng.sample(PLACES, 2), rng.sample(SERVICES, 4)
    paths = [f"backup/{each}/{service}/{name}" for each in (place, other) for service in services]
    files = {path: rows(f"port={rng.randint(1024, 65535)}", f"owner={rng.choice(PEOPLE)}") for path in paths}
    source, wrong = paths[rng.randrange(4)], paths[4 + rng.randrange(4)]
    return Step(
        f"Take the file {source} out of the archive /app/backup.tar.gz and put it at /app/restored/{name}. "
        "Nothing else of the archive may be in /app/restored.",
        f"mkdir restored\ntar -xzOf backup.tar.gz {source} >restored/{name}",
        (exact(f"restored/{name}", files[source]), listing("restored", [name])),
        (
            f"mkdir restored; tar -xzOf backup.tar.gz {wrong} >restored/{name}",
            "mkdir restored; tar -xzf backup.tar.gz -C restored",
            f"mkdir restored; tar -xzOf backup.tar.gz >restored/{name}",
        ),
        {"backup.tar.gz": archive(files)},
    )


def replace_host(rng: random.Random) -> Step:
    service, number = rng.choice(SERVICES), rng.randint(1, 9)
    old, near, new = f"{service}{number}", f"{service}{number}{rng.randint(0, 9)}", f"{service}-{rng.choice(PLACES)}"
    names = [
        f"etc/{place}{word}.conf" for word, place in zip(rng.sample(WORDS, 6), ("", "d/", "d/e/") * 2, strict=True)
    ]
    before = {
        name: rows(*(f"{rng.choice(WORDS)}={rng.choice((old, old, near))}:{rng.randint(80, 99)}" for _ in range(4)))
        for name in names
    }
    before[names[0]] += f"backup={near}\nmain={old}\nboth={old},{near},{old}\n"
    before["etc/d/README.md"] = f"The main host is {old}.\n"
    word = {name: body.replace(f"{near}", "\0").replace(old, new).replace("\0", near) for name, body in before.items()}
    after = word | {"etc/d/README.md": before["etc/d/README.md"]}
    return Step(
        f"The host {old} is now called {new}. Replace its name in every file below /app/etc whose name ends in .conf. "
        f"Other files, and other hosts such as {near}, stay as they are.",
        f"find etc -name '*.conf' -exec sed -i 's/\\b{old}\\b/{new}/g' {{}} +",
        tuple(exact(name, body) for name, body in after.items()),
        (
            f"find etc -name '*.conf' -exec sed -i 's/{old}/{new}/g' {{}} +",
            f"sed -i 's/\\b{old}\\b/{new}/g' etc/*.conf",
            f"grep -rl {old} etc | xargs sed -i 's/\\b{old}\\b/{new}/g'",
            f"find etc -name '*.conf' -exec sed -i 's/\\b{old}\\b/{new}/' {{}} +",
        ),
        before,
    )


def top_addresses(rng: random.Random) -> Step:
    addresses = [f"10.{rng.randint(0, 255)}.{i}.{rng.randint(1, 254)}" for i in rng.sample(range(256), 8)]
    counts = rng.sample(range(8, 16), 3) + rng.sample(range(1, 8), 5)
    lines = [
        f"{a} GET /{rng.choice(WORDS)} {rng.choice((200, 404))}"
        for a, n in zip(addresses, counts, strict=True)
        for _ in range(n)
    ]
    rng.shuffle(lines)
    top = sorted(zip(counts, addresses, strict=True), reverse=True)[:3]
    return Step(
        "The first word of each line of /app/access.log is an address. Write the three most frequent addresses to "
        "/app/top.txt, the most frequent first, as lines `address count` with one space between.",
        "cut -d' ' -f1 access.log | sort | uniq -c | sort -rn | head -n 3 | awk '{ print $2, $1 }' >top.txt",
        (text("top.txt", rows(*(f"{address} {count}" for count, address in top))),),
        (
            "cut -d' ' -f1 access.log | sort | uniq -c | sort -rn | head -n 3 >top.txt",
            "cut -d' ' -f1 access.log | sort | uniq -c | sort -n | head -n 3 | awk '{ print $2, $1 }' >top.txt",
            "cut -d' ' -f1 access.log | sort | uniq -c | sort -r | head -n 4 | awk '{ print $2, $1 }' >top.txt",
        ),
        {"access.log": rows(*lines)},
    )


def join_files(rng: random.Random) -> Step:
    ids = [2, 10, *rng.sample(range(11, 400), 10)]
    people, cities = rng.sample(PEOPLE, 12), rng.choices(PLACES, k=12)
    named, placed = dict(zip(ids, people, strict=True)), dict(zip(ids, cities, strict=True))
    del named[ids[-1]], placed[ids[-2]]
    both = sorted(named.keys() & placed.keys())
    first, second = [f"{i},{name}" for i, name in named.items()], [f"{i},{city}" for i, city in placed.items()]
    rng.shuffle(first)
    rng.shuffle(second)
    joined = "join -t, <(sort -t, -k1,1 people.csv) <(sort -t, -k1,1 cities.csv)"
    return Step(
        "/app/people.csv has lines id,name and /app/cities.csv has lines id,city, in no order. For every id that is in "
        "both, write a line id,name,city to /app/joined.csv, from the smallest id to the largest as numbers.",
        f"{joined} | sort -t, -k1,1n >joined.csv",
        (text("joined.csv", rows(*(f"{i},{named[i]},{placed[i]}" for i in both))),),
        (
            f"{joined} >joined.csv",
            "paste -d, people.csv cities.csv | sort -n >joined.csv",
            "join -t, -a1 <(sort -t, -k1,1 people.csv) <(sort -t, -k1,1 cities.csv) | sort -t, -k1,1n >joined.csv",
        ),
        {"people.csv": rows(*first), "cities.csv": rows(*second)},
    )


def line_endings(rng: random.Random) -> Step:
    def body(end: str) -> bytes:
        return "".join(f"{' '.join(rng.sample(WORDS, 3))}{end}" for _ in range(rng.randint(3, 6))).encode()

    texts = {
        f"docs/{place}{word}.txt": body("\r\n")
        for word, place in zip(rng.sample(WORDS, 4), ("", "a/") * 2, strict=True)
    }
    others = {"docs/start.bat": body("\r\n"), "docs/a/plain.txt": body("\n"), "docs/a/bar.txt": b"10%\r50%\r99%\n"}
    wanted = {path: data.replace(b"\r\n", b"\n") for path, data in texts.items()} | others
    return Step(
        "Lines of text files end in LF, or in CR LF. Below /app/docs, change every CR LF to LF in the files whose "
        "names end in .txt. A CR anywhere else in a line stays, and so do all other files.",
        "find docs -name '*.txt' -exec sed -i 's/\\r$//' {} +",
        tuple(exact(path, data) for path, data in wanted.items()),
        (
            "find docs -type f -exec sed -i 's/\\r$//' {} +",
            "find docs -name '*.txt' -exec sed -i 's/\\r//g' {} +",
            "sed -i 's/\\r$//' docs/*.txt",
        ),
        texts | others,
    )


def number_photos(rng: random.Random) -> Step:
    numbers = [rng.randint(1, 9), *rng.sample(range(10, 100), 4), *rng.sample(range(100, 1000), 3)]
    photos = {f"photos/IMG_{n}.jpeg": f"{rng.choice(WORDS)} {n}\n" for n in numbers}
    renamed = {f"photos/photo-{n:03d}.jpg": photos[f"photos/IMG_{n}.jpeg"] for n in numbers}
    loop = "for f in photos/IMG_*.jpeg; do n=${f##*_}; n=${n%.jpeg};"
    return Step(
        "Rename every file /app/photos/IMG_N.jpeg to photo-N.jpg in the same directory, with the number N written with "
        "three digits: IMG_7.jpeg becomes photo-007.jpg. Leave other files alone.",
        f'{loop} mv "$f" "photos/photo-$(printf %03d "$n").jpg"; done',
        (
            *(exact(path, body) for path, body in renamed.items()),
            listing("photos", [path.removeprefix("photos/") for path in renamed] + ["index.html"]),
        ),
        (
            f'{loop} mv "$f" "photos/photo-$n.jpg"; done',
            f'{loop} cp "$f" "photos/photo-$(printf %03d "$n").jpg"; done',
            f'{loop} touch "photos/photo-$(printf %03d "$n").jpg"; rm "$f"; done',
        ),
        photos | {"photos/index.html": "<html></html>\n"},
    )


MEDIUM = (
    OwnTask("total-by-place", "medium", total_by_place),
    OwnTask("fix-script", "medium", fix_script),
    OwnTask("first-of-each", "medium", first_of_each),
    OwnTask("extract-one", "medium", extract_one),
    OwnTask("replace-host", "medium", replace_host),
    OwnTask("top-addresses", "medium", top_addresses),
    OwnTask("join-files", "medium", join_files),
    OwnTask("line-endings", "medium", line_endings),
    OwnTask("number-photos", "medium", number_photos),
)
