"""Tasks of several steps of thought: debugging, forensics, merging, and episodes of several instructions.

Knows what they ask; no format and no grader.
"""

import hashlib
import random
from collections import Counter

from envs.terminal.sandbox import File
from envs.terminal.tasks.archives import compress
from envs.terminal.tasks.task import OwnTask, Step, absent, exact, link, listing, mode, rows, text
from envs.terminal.tasks.words import PEOPLE, PLACES, SERVICES, WORDS

# --- scripts to repair -----------------------------------------------------------------------------

_PEAK = """#!/bin/bash
for file in /app/readings/*.csv; do
  peak=-9999
  while IFS=, read -r time value; do
    if [ "$time" = time ]; then continue; fi
    if [ "$value" -gt "$peak" ]; then
      peak=$value
    fi
  done <"$file"
  echo "$(basename "$file" .csv) $peak"
done
"""
_LOUD = (
    ("      peak=$value\n    fi\n", "      peak=$value\n"),
    ("/readings/", "/reading/"),
    ('if [ "$value"', 'if ["$value"'),
)
_SILENT = (("peak=-9999", "peak=0"), ("-gt", "\\>"))


def two_faults(rng: random.Random) -> Step:
    loud, silent = rng.choice(_LOUD), rng.choice(_SILENT)
    below, above, *others = sorted(rng.sample(PLACES, 5))
    values = {below: rng.sample(range(-900, -100), 8), above: [9, *rng.sample(range(100, 899), 8)]}
    values |= {place: rng.sample(range(-50, 899), 8) for place in others}
    for each in values.values():
        rng.shuffle(each)
    half = _PEAK.replace(*silent)
    return Step(
        "For every file of /app/readings, in the order of their names, the script /app/peak.sh should print the name "
        "without .csv, a space, and the largest value of the file. One fault makes it fail, another makes some of its "
        "numbers wrong. Correct both, and write what it prints to /app/peaks.txt.",
        f"cat >peak.sh <<'END'\n{_PEAK}END\nbash peak.sh >peaks.txt",
        (text("peaks.txt", rows(*(f"{place} {max(values[place])}" for place in sorted(values)))),),
        (
            "bash peak.sh >peaks.txt",
            f"cat >peak.sh <<'END'\n{half}END\nbash peak.sh >peaks.txt",
            f"cat >peak.sh <<'END'\n{_PEAK.replace('-gt', '-lt').replace('-9999', '9999')}END\nbash peak.sh >peaks.txt",
        ),
        {
            "peak.sh": half.replace(*loud),
            **{
                f"readings/{place}.csv": rows("time,value", *(f"{i:02d}:00,{value}" for i, value in enumerate(each)))
                for place, each in values.items()
            },
        },
    )


_BUILD = """#!/bin/bash
set -e
cd /app
mkdir -p dist
{
  echo "version $(cat VERSION)"
  grep -v '^#' ORDER | while read -r part; do cat "src/$part.txt"; done
} >dist/bundle.txt
cd dist
sha256sum bundle.txt >bundle.txt.sha256
"""
_BROKEN_BUILD = """#!/bin/bash
cd /app/source
echo "version $VERSION" >/app/dist/bundle.txt
for part in *.txt; do
  cat $part >/app/dist/bundle.txt
done
sha256sum /app/dist/bundle.txt >/app/dist/bundle.txt.sha256
"""


def repair_build(rng: random.Random) -> Step:
    parts = rng.sample(WORDS, 7)
    version = f"{rng.randint(1, 9)}.{rng.randint(0, 20)}"
    source = {
        part: rows(*(f"{part} {' '.join(rng.sample(WORDS, 3))}" for _ in range(rng.randint(1, 4)))) for part in parts
    }
    listed = parts[1:]
    if listed == sorted(listed):
        listed.reverse()
    order = [*listed]
    order.insert(rng.randrange(len(order)), f"#{parts[0]}")
    bundle = f"version {version}\n" + "".join(source[part] for part in listed)
    digest = hashlib.sha256(bundle.encode()).hexdigest()
    return Step(
        "The script /app/build.sh is broken. It should write /app/dist/bundle.txt: first a line `version V`, where V "
        "is what /app/VERSION says, then the files /app/src/PART.txt one after the other, for the parts and in the "
        "order of the file /app/ORDER, where a line that begins with # counts for nothing. Then it should write to "
        "/app/dist/bundle.txt.sha256 what `sha256sum bundle.txt` prints in /app/dist. Correct the script and run it.",
        f"cat >build.sh <<'END'\n{_BUILD}END\nbash build.sh",
        (exact("dist/bundle.txt", bundle), text("dist/bundle.txt.sha256", f"{digest}  bundle.txt")),
        (
            "bash build.sh",
            "mkdir dist; { echo version $(cat VERSION); cat src/*.txt; } >dist/bundle.txt; cd dist; "
            "sha256sum bundle.txt >bundle.txt.sha256",
            f"cat >build.sh <<'END'\n{_BUILD.replace('cd dist', '').replace('sum bundle', 'sum dist/bundle')}END\n"
            "bash build.sh",
            f"cat >build.sh <<'END'\n{_BUILD.replace('version', 'Version')}END\nbash build.sh",
        ),
        {
            "build.sh": _BROKEN_BUILD,
            "VERSION": f"{version}\n",
            "ORDER": rows(*order),
            **{f"src/{part}.txt": body for part, body in source.items()},
        },
    )


# --- evidence --------------------------------------------------------------------------------------

_INTRUDER = """for log in logs/auth.log.3.gz logs/auth.log.2.gz; do gzip -dc "$log"; done >all.log
cat logs/auth.log.1 logs/auth.log >>all.log
awk '
  $3 == "Failed" && !inside[$NF] { failed[$NF]++ }
  $3 == "Accepted" && !inside[$NF]++ && failed[$NF] >= LEAST { print $NF; print $6; print $1 }
' all.log >report.txt
rm all.log
"""


def find_intruder(rng: random.Random) -> Step:
    least = rng.randint(12, 20)
    guesses = {"F": "Failed", "A": "Accepted"}
    histories = [
        "F" * (least + rng.randint(0, 2)) + "AFFA",
        "F" * 40,
        "A" + "F" * 30,
        "F" * (least - 1) + "AFFFA",
        "FA",
    ]
    addresses = [f"192.168.{i}.{rng.randint(2, 250)}" for i in rng.sample(range(256), len(histories))]
    turns = [address for address, history in zip(addresses, histories, strict=True) for _ in history]
    rng.shuffle(turns)
    left = {address: list(history) for address, history in zip(addresses, histories, strict=True)}
    events = [(guesses[left[address].pop(0)], rng.choice(PEOPLE), address) for address in turns]
    minutes = sorted(rng.sample(range(4 * 1440), len(events)))
    log = [
        f"{_time(minute)} sshd {what} password for {who} from {where}"
        for minute, (what, who, where) in zip(minutes, events, strict=True)
    ]
    first = next(i for i, (what, _, where) in enumerate(events) if (what, where) == ("Accepted", addresses[0]))
    days = [[line for line in log if line.startswith(f"2026-03-{day}")] for day in (11, 12, 13, 14)]
    solution = _INTRUDER.replace("LEAST", str(least))
    return Step(
        "/app/logs has the rotated logs of logins, auth.log the newest and auth.log.3.gz the oldest. Exactly one "
        f"address failed at least {least} times before its first accepted login. Write three lines to /app/report.txt: "
        "that address, the user of its first accepted login, and the time of that login as the log writes it.",
        solution,
        (text("report.txt", rows(addresses[0], events[first][1], log[first].split()[0])),),
        (
            solution.replace("gzip -dc", ": "),
            solution.replace(f">= {least}", "> 0"),
            solution.replace("!inside[$NF] {", "1 {").replace("!inside[$NF]++", "1"),
            "grep -h Failed logs/auth.log | awk '{ print $NF; print $6; print $1; exit }' >report.txt",
        ),
        {
            "logs/auth.log.3.gz": compress(rows(*days[0]).encode()),
            "logs/auth.log.2.gz": compress(rows(*days[1]).encode()),
            "logs/auth.log.1": rows(*days[2]),
            "logs/auth.log": rows(*days[3]),
        },
    )


def _time(minute: int) -> str:
    return f"2026-03-{11 + minute // 1440}T{minute // 60 % 24:02d}:{minute % 60:02d}:00Z"


_RESTORE = """sha256sum chunks/* >sums.txt
while read -r sum; do
  cat "$(awk -v sum="$sum" '$1 == sum { print $2; exit }' sums.txt)"
done <manifest.txt >restored.bin
rm sums.txt
"""


def restore_chunks(rng: random.Random) -> Step:
    chunks = [rng.randbytes(rng.randint(100, 300)) for _ in range(8)]
    names = [f"chunks/{number:08x}" for number in rng.sample(range(2**32), 11)]
    order = [*rng.sample(chunks, 8), rng.choice(chunks)]
    damaged = [chunks[0][:-1], chunks[1] + b"\0", rng.randbytes(150)]
    return Step(
        "A file was cut into chunks, which lie in /app/chunks under names that say nothing, among files that do not "
        "belong to it. /app/manifest.txt has the SHA-256 sums of its chunks, in order; a chunk may occur twice. "
        "Write the whole file to /app/restored.bin.",
        _RESTORE,
        (exact("restored.bin", b"".join(order)),),
        (
            "cat chunks/* >restored.bin",
            "cat $(sha256sum chunks/* | grep -Ff manifest.txt | cut -c67-) >restored.bin",
            _RESTORE.replace("<manifest.txt", "< <(awk '!seen[$0]++' manifest.txt)"),
        ),
        {
            "manifest.txt": rows(*(hashlib.sha256(chunk).hexdigest() for chunk in order)),
            **dict(zip(names, [*chunks, *damaged], strict=True)),
        },
    )


# --- rules to apply --------------------------------------------------------------------------------

_RUNS = """
  function holds(field, value,   parts, n, i, ends) {
    n = split(field, parts, ",")
    for (i = 1; i <= n; i++) {
      if (parts[i] == "*" || parts[i] == value "") return 1
      if (parts[i] ~ /^[*][/]/ && value % substr(parts[i], 3) == 0) return 1
      if (split(parts[i], ends, "-") == 2 && value >= ends[1] + 0 && value <= ends[2] + 0) return 1
    }
    return 0
  }
  /^#/ { next }
  holds($3, day) && holds($4, month) && holds($5, weekday) {
    runs = 0
    for (h = 0; h < 24; h++) for (m = 0; m < 60; m++) runs += holds($2, h) && holds($1, m)
    print $6, runs
  }
' schedule.txt | sort >runs.txt
"""


def count_runs(rng: random.Random) -> Step:
    day, month, weekday = rng.randint(10, 28), rng.randint(2, 11), rng.randint(1, 5)
    first, step = rng.randint(0, 9), rng.choice((5, 10, 15, 20))
    minutes = {"*": 60, f"*/{step}": 60 // step, f"{first},{first + 30}": 2, f"{first}-{first + 12}": 13}
    hours = {"*": 24, "*/6": 4, f"{first}-{first + 5},23": 7, f"{first + 10}": 1}
    yes = ("* * *", f"{day} * *", f"* {month - 1}-{month} *", f"* * {weekday}", f"5,{day} {month} 1-5", "* * 0-5")
    no = (f"{day + 1} * *", f"* {month + 1} *", f"* * {weekday + 1}", f"{day} {month} 0", f"* {month - 1} {weekday}")
    jobs, wanted = [], []
    for name, dates in zip(sorted(SERVICES, reverse=True), rng.sample(yes + no, 11), strict=False):
        minute, hour = rng.choice(list(minutes)), rng.choice(list(hours))
        jobs.append(f"{minute} {hour} {dates} {name}")
        if dates in yes:
            wanted.append(f"{name} {minutes[minute] * hours[hour]}")
    solution = f"awk -v day={day} -v month={month} -v weekday={weekday} '{_RUNS}"
    return Step(
        "Each line of /app/schedule.txt is `minute hour day month weekday job`, or a comment that begins with #. A job "
        "runs at every minute at which all five fields hold. A field is a list, separated by commas, of * (always), "
        "*/N (when N divides the value), A-B (from A to B, both included) and numbers; Sunday is weekday 0. "
        f"For every job that runs on day {day} of month {month}, which is weekday {weekday}, write a line "
        "`job count` to /app/runs.txt, where count is how often it runs from 00:00 to 23:59. Sort by job.",
        solution,
        (text("runs.txt", rows(*sorted(wanted))),),
        (
            solution.replace(" && holds($5, weekday)", ""),
            solution.replace("| sort ", ""),
            solution.replace("holds($2, h) && holds($1, m)", "holds($2, h)"),
            "awk '!/^#/ { print $6, 1 }' schedule.txt | sort >runs.txt",
        ),
        {"schedule.txt": rows("# minute hour day month weekday job", *jobs, "#0 0 * * * amber")},
    )


_MODES = {".sh": 0o750, ".key": 0o600, ".txt": 0o640, ".conf": 0o640}
_AUDIT = """audit() { find srv -type f "$@"; }
{
  audit -name '*.sh' ! -perm 750
  audit -name '*.key' ! -perm 600
  audit ! -name '*.sh' ! -name '*.key' ! -perm 640
} | LC_ALL=C sort >changed.txt
audit -name '*.sh' -exec chmod 750 {} +
audit -name '*.key' -exec chmod 600 {} +
audit ! -name '*.sh' ! -name '*.key' -exec chmod 640 {} +
"""


def audit_modes(rng: random.Random) -> Step:
    endings = [*_MODES, *_MODES, *_MODES]
    stems = [f"{place}{word}" for word, place in zip(rng.sample(WORDS, 12), ("", "a/", "b/c/") * 4, strict=True)]
    wanted = {f"srv/{stem}{ending}": _MODES[ending] for stem, ending in zip(stems, endings, strict=True)}
    changed = sorted(rng.sample(sorted(wanted), rng.randint(4, 7)))
    present = {
        path: rng.choice([bits for bits in (0o600, 0o640, 0o644, 0o664, 0o750, 0o755, 0o777) if bits != right])
        if path in changed
        else right
        for path, right in wanted.items()
    }
    return Step(
        "Below /app/srv, files whose names end in .sh must have mode 750, those in .key mode 600, and all other files "
        "mode 640. Correct the files that differ, and write the paths of the files that "
        "you had to correct to /app/changed.txt: one a line, such as srv/a/x.sh, in the order of `LC_ALL=C sort`.",
        _AUDIT,
        (
            text("changed.txt", rows(*changed)),
            *(mode(path, bits) for path, bits in wanted.items()),
        ),
        (
            _AUDIT.replace("! -perm 640", "").replace("! -perm 750", "").replace("! -perm 600", ""),
            _AUDIT.replace("-exec chmod 600 {} +", "")
            .replace("-exec chmod 750 {} +", "")
            .replace("-exec chmod 640 {} +", ""),
            _AUDIT + "chmod -R 750 srv",
            _AUDIT.replace("find srv", "find /app/srv"),
        ),
        {path: File(f"{path}\n".encode(), bits) for path, bits in present.items()},
    )


_MERGE = """awk -F= '
  FNR == 1 { side++ }
  { value[side, $1] = $2; keys[$1] }
  END {
    for (key in keys) {
      base = value[1, key]; ours = value[2, key]; theirs = value[3, key]
      kept = ours == base ? theirs : ours
      if (ours != base && theirs != base && ours != theirs) print key >"conflicts.txt"
      if (kept != "") print key "=" kept
    }
  }
' base.conf ours.conf theirs.conf | sort >merged.conf
sort -o conflicts.txt conflicts.txt
"""

# base, ours, theirs of one key, as the number of a value; 0 where the key is missing
_CHANGES = (
    (1, 1, 1),
    (1, 2, 1),
    (1, 1, 3),
    (1, 2, 2),
    (1, 2, 3),
    (1, 2, 3),
    (1, 0, 1),
    (1, 1, 0),
    (1, 0, 3),
    (0, 2, 0),
)
_CHANGES += ((0, 0, 3), (0, 2, 3), (1, 0, 0), (1, 1, 1), (1, 2, 0), (1, 2, 1), (1, 1, 3))


def merge_settings(rng: random.Random) -> Step:
    keys = rng.sample(WORDS, len(_CHANGES))
    values = [("", *rng.sample(PEOPLE, 3)) for _ in keys]
    sides = [
        {key: value[change[side]] for key, value, change in zip(keys, values, _CHANGES, strict=True) if change[side]}
        for side in range(3)
    ]
    base, ours, theirs = sides
    pick = {key: theirs.get(key) if ours.get(key) == base.get(key) else ours.get(key) for key in keys}
    conflicts = [key for key in keys if len({side.get(key) for side in sides}) == 3]
    conf = [rows(*(f"{key}={value}" for key, value in side.items())) for side in sides]
    merged = rows(*sorted(f"{key}={value}" for key, value in pick.items() if value))
    return Step(
        "/app/base.conf was changed by two people, into /app/ours.conf and /app/theirs.conf. Lines are key=value; "
        "adding and removing a line are changes too. Merge them into /app/merged.conf, sorted by key: a key that only "
        "one side changed is as that side has it; one that both changed is as ours has it. Write the keys that both "
        "changed, and not to the same, to /app/conflicts.txt, sorted, one a line.",
        _MERGE,
        (text("merged.conf", merged), text("conflicts.txt", rows(*sorted(conflicts)))),
        (
            _MERGE.replace(" && ours != theirs", ""),
            _MERGE.replace("ours == base ? theirs : ours", "theirs == base ? ours : theirs"),
            "cp ours.conf merged.conf; : >conflicts.txt",
            _MERGE.replace('if (kept != "") ', ""),
        ),
        dict(zip(("base.conf", "ours.conf", "theirs.conf"), conf, strict=True)),
    )


_VALIDATE = """awk -F, '
  NR == 1 { print >"valid.csv"; next }
  NF == 4 && $1 ~ /^[0-9]+$/ && !seen[$1] && $2 ~ /^2026-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])$/ &&
  $3 ~ /^[1-9][0-9]*$/ && $4 ~ /^[1-9][0-9]*$/ {
    seen[$1] = 1
    total += $3 * $4
    print >"valid.csv"
    next
  }
  { print NR >"invalid.txt" }
  END { print total >"total.txt" }
' orders.csv
"""


# column and what makes it invalid
_FAULTS = ((0, "A17"), (0, ""), (1, "2026-13-05"), (1, "2026-00-11"), (1, "05.03.2026"), (1, "2025-11-30"), (2, "0"))
_FAULTS += ((2, "-4"), (2, "2.5"), (3, ""), (3, "free"))


def validate_orders(rng: random.Random) -> Step:
    """The one task of several rewards: each file is worth its own."""
    ids = rng.sample(range(1000, 9999), 30)
    orders = [[f"{i}", _date(rng), f"{rng.randint(1, 20)}", f"{rng.randint(5, 900)}"] for i in ids]
    broken = dict(zip(rng.sample(range(2, 29), len(_FAULTS)), _FAULTS, strict=True))
    for i, (column, value) in broken.items():
        orders[i][column] = value
    orders[29].append("5")
    orders.append([orders[0][0], _date(rng), "2", "40"])  # an id that a valid row has
    invalid = [*sorted(broken), 29, 30]
    valid = [order for i, order in enumerate(orders) if i not in invalid]
    total = sum(int(quantity) * int(price) for _, _, quantity, price in valid)
    header = "id,date,quantity,price"
    return Step(
        f"/app/orders.csv has the columns {header}, with a header line. A row is valid if it has four fields; its id "
        "is digits only and no earlier valid row has it; its date is YYYY-MM-DD in 2026 with a month from 01 to 12 and "
        "a day from 01 to 28; quantity and price are whole numbers of at least 1, without sign or leading zero. Write "
        "three files, each of which counts for itself: /app/valid.csv, the header and the valid rows in their order; "
        "/app/invalid.txt, the line numbers of the other rows in orders.csv (the header is line 1), one a line; and "
        "/app/total.txt, the sum of quantity times price over the valid rows.",
        _VALIDATE,
        (
            text("valid.csv", rows(header, *map(",".join, valid)), key="valid"),
            text("invalid.txt", rows(*(i + 2 for i in invalid)), key="invalid"),
            text("total.txt", f"{total}", key="total"),
        ),
        (
            _VALIDATE.replace("!seen[$1] &&", ""),
            _VALIDATE.replace("NF == 4 && ", ""),
            "cp orders.csv valid.csv; : >invalid.txt; echo 0 >total.txt",
        ),
        {"orders.csv": rows(header, *map(",".join, orders))},
    )


def _date(rng: random.Random) -> str:
    return f"2026-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


# --- several instructions --------------------------------------------------------------------------


def errors_by_day(rng: random.Random) -> tuple[Step, ...]:
    services = rng.sample(SERVICES, 5)
    worst, later = rng.sample(services, 2)
    first = Counter({each: rng.randint(1, 6) for each in services} | {worst: rng.randint(8, 12)})
    second = Counter({each: rng.randint(1, 3) for each in services} | {later: rng.randint(15, 20)})
    both = first + second

    def log(errors: Counter[str]) -> str:
        lines = [f"ERROR {service} {rng.choice(WORDS)}" for service in errors.elements()]
        lines += [f"INFO {rng.choice(services)} {rng.choice(WORDS)}" for _ in range(20)]
        rng.shuffle(lines)
        return rows(*lines)

    def counts(errors: Counter[str]) -> str:
        return rows(*(f"{service} {errors[service]}" for service in sorted(errors)))

    count = "awk '$1 == \"ERROR\" { n[$2]++ } END { for (s in n) print s, n[s] }' LOGS | sort >errors.txt"
    return (
        Step(
            "Lines of /app/logs/day1.log are `level service word`. For each service, write a line `service count` to "
            "/app/errors.txt, where count is how many lines of level ERROR it has. Sort by service.",
            count.replace("LOGS", "logs/day1.log"),
            (text("errors.txt", counts(first)),),
            (
                count.replace("LOGS", "logs/day1.log").replace('$1 == "ERROR" ', ""),
                count.replace("LOGS", "logs/day1.log").replace("| sort ", "| sort -r "),
            ),
            {"logs/day1.log": log(first)},
            name="first-day",
            min_reward=1.0,
        ),
        Step(
            "/app/logs/day2.log has arrived. Make /app/errors.txt count both days together, in the same format, and "
            "write the name of the service with the most errors over both days to /app/worst.txt.",
            count.replace("LOGS", "logs/day1.log logs/day2.log")
            + "\nsort -k2,2nr errors.txt | head -n 1 | cut -d' ' -f1 >worst.txt",
            (text("errors.txt", counts(both)), text("worst.txt", later)),
            (
                count.replace("LOGS", "logs/day2.log") + f"\necho {later} >worst.txt",
                count.replace("LOGS", "logs/day1.log logs/day2.log") + f"\necho {worst} >worst.txt",
                f"echo {later} >worst.txt",
            ),
            {"logs/day2.log": log(second)},
            name="second-day",
        ),
    )


def release(rng: random.Random) -> tuple[Step, ...]:
    numbers = [rng.randint(6, 9), *sorted(rng.sample(range(10, 60), 4))]
    *old, new = [f"1.{number}" for number in numbers]
    page, script = rows(*rng.sample(WORDS, 5)), f"#!/bin/sh\necho {rng.choice(WORDS)}\n"
    made = (
        exact(f"releases/{new}/page.txt", page),
        exact(f"releases/{new}/run.sh", script),
        text(f"releases/{new}/VERSION", new),
        listing(f"releases/{new}", ["page.txt", "run.sh", "VERSION"]),
        mode(f"releases/{new}/run.sh", 0o755),
    )
    newest = f"ln -sfn /app/releases/{new} current"
    return (
        Step(
            f"Make the release {new}: a directory /app/releases/{new} with copies of the files of /app/build, where "
            f"run.sh has mode 755, and a file VERSION that says {new}. Nothing else may be in it.",
            f"cp -r build releases/{new}\nchmod 755 releases/{new}/run.sh\necho {new} >releases/{new}/VERSION",
            made,
            (
                f"cp -r build releases/{new}; echo {new} >releases/{new}/VERSION",
                f"cp -r build releases/{new}; chmod 755 releases/{new}/run.sh; echo {old[-1]} >releases/{new}/VERSION",
            ),
            {
                "build/page.txt": page,
                "build/run.sh": script,
                **{f"releases/{each}/VERSION": f"{each}\n" for each in old},
            },
            name="make",
            min_reward=1.0,
        ),
        Step(
            f"Put the release {new} in use: make /app/current a symbolic link to its directory, and write the names of "
            "all releases to /app/releases.txt, one a line, from the oldest to the newest (1.9 is older than 1.10).",
            f"{newest}\nls releases | sort -t. -k1,1n -k2,2n >releases.txt",
            (*made, link("current", f"releases/{new}"), text("releases.txt", rows(*old, new))),
            (
                f"{newest}; ls releases | LC_ALL=C sort >releases.txt",
                f"ln -s /app/releases/{old[0]} current; ls releases | sort -t. -k2,2n >releases.txt",
                newest,
            ),
            name="use",
            min_reward=1.0,
        ),
        Step(
            "Delete all releases but the two newest from /app/releases. The link /app/current and /app/releases.txt "
            "stay as they are.",
            'ls releases | sort -t. -k1,1n -k2,2n | head -n -2 | while read -r name; do rm -r "releases/$name"; done',
            (
                *made,
                link("current", f"releases/{new}"),
                text("releases.txt", rows(*old, new)),
                text(f"releases/{old[-1]}/VERSION", old[-1]),
                *(absent(f"releases/{each}") for each in old[:-1]),
            ),
            (
                'ls releases | LC_ALL=C sort | head -n -2 | while read -r name; do rm -r "releases/$name"; done',
                f"cd releases; ls | grep -vx {new} | xargs rm -r",
                f"cd releases; rm -r {' '.join(old[:-1])} ../current",
            ),
            name="prune",
        ),
    )


HARD = (
    OwnTask("two-faults", "hard", two_faults),
    OwnTask("repair-build", "hard", repair_build),
    OwnTask("find-intruder", "hard", find_intruder),
    OwnTask("restore-chunks", "hard", restore_chunks),
    OwnTask("count-runs", "hard", count_runs),
    OwnTask("audit-modes", "hard", audit_modes),
    OwnTask("merge-settings", "hard", merge_settings),
    OwnTask("validate-orders", "hard", validate_orders),
    OwnTask("errors-by-day", "hard", errors_by_day),
    OwnTask("release", "hard", release),
)
