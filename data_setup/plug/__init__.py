"""`python -m data_setup.plug`: public data sets, from the folder that their owners hand out to a training.

In: a folder in a set's own layout. Out: manifest.tsv, participants.tsv, labels.tsv, label files and
label_classes.yaml, so that prepare and finetuning.train are the next two commands. Nothing is downloaded.
Read facts.py first, then one file of sets/.
"""
