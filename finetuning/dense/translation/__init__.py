"""task.kind=translation: flow of OCTA from the structural scan: en-face slabs from a frozen encoder's tokens.

In: a checkpoint, a store with flow (data_setup.prepare --flow). Out: a decoder, L1 and SSIM of each slab and
volume with intervals, a picture. Read kind.py first; volumes says who is learnt from, decoder what is
trained, baseline what is known without an encoder.
"""
