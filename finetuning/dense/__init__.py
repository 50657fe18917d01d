"""What decoders of every A-scan or voxel share: task.kind=layers (finetuning/layers), segmentation
(finetuning/segmentation) and translation (finetuning/translation).

In: a frozen encoder, a store with heights, label volumes or flow. Out: folds of volumes, trained decoders in
a head's file, estimates with intervals. Read training.py first.
"""
