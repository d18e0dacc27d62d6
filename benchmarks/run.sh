#!/usr/bin/env bash
# Reproduces the published figures into benchmarks/results (or $OUT): several hours on two quiet cores.
#   make bench DATA=folder-with-the-prompt-files
# Times first, while nothing else runs; steps and tokens do not depend on the machine's load.
set -feuo pipefail  # f: the brackets of a config are no pattern
cd "$(dirname "$0")"
DATA=${DATA:?the folder of mt_bench_question.jsonl, HumanEval.jsonl.gz and spec_bench_question.jsonl}
PYTHON=${PYTHON:-python}
OUT=${OUT:-results}
DATA=$(cd .. && realpath "$DATA")
case $PYTHON in */*) PYTHON=$(cd .. && realpath --no-symlinks "$PYTHON") ;; esac
mkdir -p "$OUT"
TEXTS=$(mktemp -d)
trap 'rm -rf "$TEXTS"' EXIT

MT_BENCH=(mt-bench "$DATA/mt_bench_question.jsonl" --max-new-tokens 160)
HUMANEVAL=(humaneval "$DATA/HumanEval.jsonl.gz" --max-new-tokens 160)
TRANSLATION=(spec-bench "$DATA/spec_bench_question.jsonl" --category translation --stride 8)

# Options of tokens_per_step.py: a budget, and whatever else, of a config of fixed width.
fixed() { echo --lookahead "{\"budget\":$1,\"adaptive\":false${2:+,$2}}"; }

"$PYTHON" machine.py > "$OUT/machine.json"
"$PYTHON" pool_cost.py | tail -1 > "$OUT/pool_cost.jsonl"
for dtype in bfloat16 float32; do
  "$PYTHON" wall_clock.py "${MT_BENCH[@]}" --stride 10 --dtype "$dtype"
  "$PYTHON" wall_clock.py "${TRANSLATION[@]}" --dtype "$dtype" --arms plain default
  "$PYTHON" wall_clock.py random-words --temperature 1.5 --dtype "$dtype" --arms plain default
done > "$OUT/wall_clock.jsonl"
"$PYTHON" editing.py > "$OUT/editing.jsonl"

{
  "$PYTHON" tokens_per_step.py "${MT_BENCH[@]}" --stride 2 --along-plain "$TEXTS/mt" \
    $(fixed 32) $(fixed 64) $(fixed 128)
  "$PYTHON" tokens_per_step.py "${HUMANEVAL[@]}" --stride 4 --along-plain "$TEXTS/he" \
    $(fixed 32) $(fixed 64) $(fixed 128)
} > "$OUT/tokens_per_step.jsonl"

ABLATION=(
  $(fixed 32)
  $(fixed 32 '"sources":["suffix"]')
  $(fixed 32 '"sources":["recycled"]')
  $(fixed 32 '"sources":["prompt_ngrams"]')
  $(fixed 32 '"sources":["pool"],"window":5')
  $(fixed 32 '"window":5')
  $(fixed 32 '"sources":["recycled","pool"],"window":5')
  $(fixed 32 '"sources":["suffix","pool"],"window":5')
  $(fixed 32 '"window":3,"ngram":3')
  $(fixed 8) $(fixed 16)
  --lookahead paper
)
{
  "$PYTHON" tokens_per_step.py "${MT_BENCH[@]}" --stride 10 --along-plain "$TEXTS/mt-few" "${ABLATION[@]}"
  "$PYTHON" tokens_per_step.py "${HUMANEVAL[@]}" --stride 20 --along-plain "$TEXTS/he-few" "${ABLATION[@]}"
} > "$OUT/ablation.jsonl"

SAMPLED=("$PYTHON" tokens_per_step.py "${MT_BENCH[@]}" --stride 10 --seeds 3)
{
  "${SAMPLED[@]}" --temperature 1.0 $(fixed 32) --lookahead paper
  "${SAMPLED[@]}" --temperature 1.0 --blind $(fixed 32)
  "${SAMPLED[@]}" --temperature 0.7 $(fixed 32)
  "${SAMPLED[@]}" --temperature 1.0 --top-p 0.9 $(fixed 32)
} > "$OUT/sampling.jsonl"
{
  "$PYTHON" tokens_per_step.py "${MT_BENCH[@]}" --stride 10 $(fixed 32)
  "$PYTHON" tokens_per_step.py "${MT_BENCH[@]}" --stride 10 --warm $(fixed 32)
} > "$OUT/memory.jsonl"
"$PYTHON" exactness.py "$DATA/mt_bench_question.jsonl" --stride 16 --lookahead default --lookahead paper \
  > "$OUT/exactness.jsonl"

# bf16 against plain decoding: the counts, and the prompts that differ; what is called a bug (1) is a figure as well.
sed -n '1~2p' "$DATA/mt_bench_question.jsonl" > "$TEXTS/second.jsonl"
sed -n '1~4p' "$DATA/mt_bench_question.jsonl" > "$TEXTS/fourth.jsonl"
CHECK=("$PYTHON" -m lookahead_decoding bench check --threads 1 --json --prompts)
{
  "${CHECK[@]}" "$TEXTS/second.jsonl" || [ $? = 1 ]
  "${CHECK[@]}" "$TEXTS/fourth.jsonl" --temperature 1 --seed 0 || [ $? = 1 ]
} | grep -v '"identical": true' > "$OUT/check.jsonl"
