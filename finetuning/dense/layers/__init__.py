"""task.kind=layers: ordered surfaces of the retina from a frozen encoder's tokens, in micrometres.

In: a checkpoint, a store with height maps (data_setup.prepare --heights). Out: a decoder, its boundary
errors, overlap of layers, and thickness in the nine sectors of the ETDRS grid. Read kind.py first; volumes
says who is learnt from, decoder what is trained, metrics and etdrs what is measured.
"""
