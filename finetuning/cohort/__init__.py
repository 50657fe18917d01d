"""Who a task is learnt from and judged on.

In: a configuration, the store's index, a table of labels. Out: a `Source` (what the task starts from), a
`Cohort` (volumes, folds, targets, people), a line in the ledger of looks. Read cohort.py first.
"""
