"""One eye, several scanners: does an encoder, or a head, say the same of it.

In: a checkpoint or a head, a prepared store with eyes that several devices have photographed. Out:
same_eye.json and same_eye.md. Read run.py first.
"""
