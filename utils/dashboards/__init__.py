"""Where a run's numbers can be watched: Weights & Biases, TensorBoard.

In: metrics, pictures, counts and alerts of the first process, by optimizer step. Out: log.txt, metrics.jsonl
and what each service shows. Read run_log.py first; writer.py says what a writer does.
"""
