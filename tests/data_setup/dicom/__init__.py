"""Tests of data_setup/readers/dicom.py and pixels.py."""
