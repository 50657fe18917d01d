"""`python -m data_setup.expand`: zip archives -> a tree of files, on disk or in a bucket.

In: archives. Out: their files, each with its checksum verified, and a state that lets a stopped run go on.
Read cli.py first.
"""
