"""What decoders of every A-scan or voxel share: task.kind=layers (finetuning/layers) and segmentation
(finetuning/segmentation).

In: a frozen encoder, a store with heights or label volumes. Out: folds of volumes, trained decoders in a
head's file, estimates with intervals. Read training.py first.
"""
