"""YAML and `section.key=value` -> one checked, frozen `Config`.

In: a file of configs/ and overrides. Out: a `Config`, or an error that names the key. schema.py has every key
with its meaning, load.py reads and checks. Read schema.py first.
"""
