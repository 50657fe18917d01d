"""`prepare --check-only`: what is in a tree, from the first bytes of each file.

In: the manifest and the files' headers. Out: counts of what can be prepared and of what cannot, by reason. No
pixel is decoded and no store is written. Read tree.py first.
"""
