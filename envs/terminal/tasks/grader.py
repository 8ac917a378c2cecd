"""The one test.sh of all our tasks. It reads a table of checks that lies beside it, and knows no task.

What it trusts: its own directory, bash, and the system's programs. It runs no file that a command of the episode could
have written, follows no link below /app, and compares with what is in its own directory only. So it may grade the root
that the episode left, or a fresh one that shows /app read-only.

The table, `checks.tsv`, has one check a line: reward key, kind, path, what is wanted (a value, or the name of a file
beside the table). A failed check is a reward of 0; a grader that cannot work writes no reward, which is an error.
"""

TABLE = "checks.tsv"
LARGEST = 4 * 1024 * 1024  # bytes of a file that is looked into

GRADER = rf"""#!/bin/bash -p
set -u -f -o pipefail
PATH=/usr/sbin:/usr/bin:/sbin:/bin
LC_ALL=C
export PATH LC_ALL
umask 022
for tool in cmp dirname find mkdir readlink rm sed sort stat tr; do
  type -P "$tool" >/dev/null || {{ echo "the grader needs $tool" >&2; exit 2; }}
done
tests=$(dirname -- "$(readlink -f -- "${{BASH_SOURCE[0]}}")") || exit 2
logs=/logs/verifier

# No part of the path $1 is a link.
unlinked() {{
  local here=$1
  while [[ -n $here ]]; do
    [[ ! -L $here ]] || return 1
    here=${{here%/*}}
  done
}}

# $1 is a file that may be read.
file() {{
  unlinked "$1" && [[ -f $1 ]] && (( $(stat -c %s -- "$1") <= {LARGEST} ))
}}

# The file $1 without white space at the end of its lines. A NUL must not vanish, as it would in a variable.
lines() {{
  tr '\0' '\1' <"$1" | sed 's/[[:space:]]*$//'
}}

check_text() {{
  local have want
  file "$1" && have=$(lines "$1") && want=$(lines "$tests/$2") && [[ $have == "$want" ]]
}}

check_bytes() {{
  file "$1" && cmp -s -- "$1" "$tests/$2"
}}

check_listing() {{
  unlinked "$1" && [[ -d $1 ]] && find "$1" -mindepth 1 -printf '%P\n' | sort | cmp -s - "$tests/$2"
}}

check_mode() {{
  unlinked "$1" && [[ -e $1 && $(stat -c %a -- "$1") == "$2" ]]
}}

check_link() {{
  unlinked "${{1%/*}}" && [[ -L $1 && $(readlink -f -- "$1") == "$2" ]]
}}

check_absent() {{
  [[ ! -e $1 && ! -L $1 ]]
}}

declare -A reward=()
keys=()
while IFS=$'\t' read -r key kind path wanted; do
  [[ -v reward[$key] ]] || {{ keys+=("$key"); reward[$key]=1; }}
  declare -F "check_$kind" >/dev/null || {{ echo "no kind of check is called $kind" >&2; exit 2; }}
  "check_$kind" "$path" "$wanted" || {{ reward[$key]=0; echo "$key: $kind $path: no"; }}
done <"$tests/{TABLE}" || exit 2
(( ${{#keys[@]}} )) || exit 2

mkdir -p "$logs" && rm -f "$logs/reward.txt" "$logs/reward.json" || exit 2
if [[ ${{keys[*]}} == reward ]]; then
  echo "${{reward[reward]}}" >"$logs/reward.txt"
else
  pairs=
  for key in "${{keys[@]}}"; do pairs+="${{pairs:+, }}\"$key\": ${{reward[$key]}}"; done
  echo "{{$pairs}}" >"$logs/reward.json"
fi
"""
