"""Predictions as files that other programs open, in the geometry of the scan that they are of.

In: classes of voxels, or surfaces, in the frame order of the scan's file; what its header says. Out: NIfTI or
PNG (masks.py), DICOM Segmentation (dicom_seg.py), DICOM Height Map Segmentation (height_map.py).
"""
