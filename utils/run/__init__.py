"""What every training has besides its loop; a training program opens guard.py first.

In: a configuration, and the loop. Out: a run folder that belongs to it, one training at a time that writes
checkpoints there, a line that a person reads, and an exit code.
"""
