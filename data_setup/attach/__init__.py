"""What lies on a store's volumes, on their own grid: height maps, label volumes, flow of OCTA.

In: a finalised store, and a manifest whose lines name files with the scans that they are about. Out: arrays
beside the volumes with a chunk a row, and a table that counts every mismatch by reason. stored.py lists what
can lie there, writes and reads it; heights.py, labels.py and flow.py are the three modes of
`data_setup.prepare`, whose work jobs.py does. Read stored.py first.
"""
