"""`python -m data_setup.index FOLDER`: the two tables that prepare needs, for any tree of OCT files.

In: a folder on a disk or in a bucket; headers, and the first image of a folder of images. Out: manifest.tsv,
participants.tsv, left_out.tsv, where exports have grids labels.parquet, and a summary in words. Nothing is
converted, and no other file is changed. sets/ knows public data sets. Read cli.py first.
"""
