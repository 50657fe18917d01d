"""task.kind=segmentation: a class for every voxel from a frozen encoder's tokens, and voxels beside them.

In: a checkpoint, a store with label volumes (data_setup.prepare --labels). Out: a decoder, Dice of each class
and volume with intervals. Read kind.py first; volumes says who is learnt from, loss what is trained.
"""
