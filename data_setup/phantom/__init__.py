"""`python -m data_setup.phantom`: a synthetic AI-READI tree with known anatomy and planted faults.

In: a number of participants, a seed and a size. Out: OPT DICOM files, the manifest, the participants' table
and the truth (layer heights). It proves machinery; it says nothing about real retinas. cohort.py draws
people, anatomy.py eyes, render.py voxels, dicom.py files, beside.py OCTA and labels. Read cohort.py first.
"""
