#!/usr/bin/env bash
# random.sh CARRY OUT [PROBLEMS] [PROCESSES]: random problems with every option against the oracle, cuDNN in the form that it is asked for as usual,
# PROCESSES side by side (as many as processors). CARRY holds the binary `device`. Of each part about PROBLEMS are drawn from seeds that no other
# process has, of packed and paged ones three and two times as many, as most of theirs are declined; FIRST moves all seeds. Whatever LIMIT seconds (540)
# did not see the end of is ended, and a failure. UNDER goes before each command, as in
# UNDER='compute-sanitizer --tool memcheck --error-exitcode 9' FIRST=90000 benches/random.sh carry out 4
# Raw output goes to OUT/random; the end, OUT/random.txt, is a table of what passed, was declined and failed, and a command for each failure.
set -u
carry=$(cd "$1" && pwd); mkdir -p "$2/random"; out=$(cd "$2/random" && pwd); problems=${3:-360}; processes=${4:-$(nproc)}
first=${FIRST:-0} each=20; [ "$problems" -ge "$each" ] || each=$problems
rm -f "$out"/*
if [ -z "${CUDNN_GRAPH_LIBRARY:-}" ]; then
  site=$(python3 -c 'import nvidia.cudnn as c; print(list(c.__path__)[0])' 2>/dev/null) && export CUDNN_GRAPH_LIBRARY=$site/lib
fi
export carry out each under=${UNDER:-} ends=$(($(date +%s) + ${LIMIT:-540}))
work() { # PART FIRST
  local left=$((ends - $(date +%s))) log=$out/$1-$2.txt status=124
  # shellcheck disable=SC2086
  if [ "$left" -gt 0 ]; then timeout -k 5 "$left" $under "$carry/device" suite "$each" "$1" "$2" > "$log" 2>&1; status=$?; else : > "$log"; fi
  # What did not come to its summary: by time, by a signal, or before it began. Whoever sees errors of memory ends with a number of its own.
  if ! grep -q 'backward drawn: ' "$log" || [ "$status" -gt 1 ]; then echo "$1 $2 $status" >> "$out/unended"; fi
}
export -f work
for ((at = 0; at < problems; at += each)); do
  for part in packed random paged trees packed sinks ends paged dropout pieces packed fp8; do
    echo "$part $first"; first=$((first + each))
  done
done | xargs -P "$processes" -L 1 bash -c 'work "$@"' work
{
  date -u +%F; nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null; grep -hom1 'cuDNN [0-9.]*' "$out"/*-*.txt | sort -u
  awk '
    $1 !~ /^(pass|SKIP|FAIL)$/ || $2 != "cudnn" { next }
    { pass = $4 == "backward" ? "backward" : "forward"; n[$3, pass, $1]++; n["all", pass, $1]++; if (!($3 in seen)) { seen[$3]; parts[++many] = $3 } }
    END {
      parts[++many] = "all"; printf "%-8s %28s %28s\n", "", "forward", "backward"; printf "%-8s", ""
      for (i = 0; i < 2; i++) printf " %9s %9s %8s", "passed", "declined", "failed"
      print ""
      for (i = 1; i <= many; i++) {
        printf "%-8s", parts[i]
        for (j = 1; j <= 2; j++) { pass = j == 1 ? "forward" : "backward"; printf " %9d %9d %8d", n[parts[i], pass, "pass"], n[parts[i], pass, "SKIP"], n[parts[i], pass, "FAIL"] }
        print ""
      }
    }' "$out"/*-*.txt
  awk '/^FAIL/ { what = $0 } /^  device suite 1 / { print substr($0, 3) "  # " what }' "$out"/*-*.txt
  [ ! -e "$out/unended" ] || while read -r part from status; do
    echo "DID NOT END: ${under:+$under }device suite $each $part $from (status $status) after: $(tail -n 1 "$out/$part-$from.txt" | cut -c1-200)"
  done < "$out/unended"
} | tee "$out.txt"
! grep -q '^FAIL' "$out"/*-*.txt && [ ! -e "$out/unended" ]
