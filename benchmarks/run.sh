#!/usr/bin/env bash
# Reproduces the published figures into benchmarks/results (or $OUT): one to two hours on two quiet cores.
#   make bench DATA=folder-with-the-prompt-files
set -euo pipefail
cd "$(dirname "$0")"
DATA=${DATA:?the folder of mt_bench_question.jsonl and HumanEval.jsonl.gz}
PYTHON=${PYTHON:-python}
OUT=${OUT:-results}
DATA=$(cd .. && realpath "$DATA")
case $PYTHON in */*) PYTHON=$(cd .. && realpath --no-symlinks "$PYTHON") ;; esac
mkdir -p "$OUT"

MT_BENCH=(mt-bench "$DATA/mt_bench_question.jsonl" --stride 10)
HUMANEVAL=(humaneval "$DATA/HumanEval.jsonl.gz" --stride 20)
WITH_PROMPT_NGRAMS='{"preset": "paper", "sources": ["prompt_ngrams", "pool"]}'

"$PYTHON" machine.py > "$OUT/machine.json"
"$PYTHON" pool_cost.py | tail -1 > "$OUT/pool_cost.jsonl"
"$PYTHON" -m lookahead_decoding demo --repeats 5 --no-color > "$OUT/demo.txt"
for task in MT_BENCH HUMANEVAL; do
  declare -n arguments=$task
  "$PYTHON" tokens_per_step.py "${arguments[@]}" --lookahead default
  "$PYTHON" tokens_per_step.py "${arguments[@]}" --seeds 3 --lookahead paper --lookahead "$WITH_PROMPT_NGRAMS"
done > "$OUT/tokens_per_step.jsonl"
{
  for task in MT_BENCH HUMANEVAL; do
    declare -n arguments=$task
    for penalty in 1.05 1.1; do
      "$PYTHON" tokens_per_step.py "${arguments[@]}" --repetition-penalty "$penalty" \
        --lookahead default --lookahead "$WITH_PROMPT_NGRAMS"
    done
    "$PYTHON" tokens_per_step.py "${arguments[@]}" --temperature 1.0 --top-p 0.9 \
      --lookahead default --lookahead "$WITH_PROMPT_NGRAMS"
  done
  "$PYTHON" tokens_per_step.py "${MT_BENCH[@]}" --dtype float32 --lookahead paper
  "$PYTHON" tokens_per_step.py mt-bench "$DATA/mt_bench_question.jsonl" --stride 2 --lookahead paper
} > "$OUT/tokens_per_step_variants.jsonl"
{
  "$PYTHON" exactness.py "$DATA/mt_bench_question.jsonl" --stride 4 --lookahead default --lookahead paper
  "$PYTHON" exactness.py "$DATA/mt_bench_question.jsonl" --stride 16
} > "$OUT/exactness.jsonl"
