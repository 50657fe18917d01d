"""Where a run's numbers can be watched: Weights & Biases, TensorBoard.

In: metrics, pictures, counts and alerts of the first process, by optimizer step. Out: what each
service shows. writer.py says what a writer does.
"""
