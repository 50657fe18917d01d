"""One file -> its header and uint8 frames, or a named reason why not.

In: the URL of an OPT DICOM file, a NIfTI file, a TIFF file, a folder of images or a Heidelberg export. Out:
an `OCTHeader` (spacing, order, laterality, device) and frames in (D, H, W) order. faults.py names the
reasons. Read open_record.py first: it chooses the reader.
"""
